"""
The fixed parts of the HTML page: its style, and its script for stepping and zooming.

The script writes text only with `textContent`, so no text of a table can become markup.
"""

from __future__ import annotations

from typing import Final

from .svg import FAINT, GREY, INK, PALE, PINK, RED

__all__ = ["SCRIPT", "STYLE"]

STYLE: Final = f"""
body {{ font: 14px/1.45 "DejaVu Sans", Verdana, Helvetica, Arial, sans-serif; color: {INK};
  margin: 1em 1.5em; }}
h1 {{ font-size: 1.25em; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.05em; margin: 0; color: {RED}; }}
#verdict.refused {{ border-left: 4px solid {RED}; background: {PINK}; padding: .6em 1em; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15em 1em; margin: .5em 0; }}
dt {{ color: {GREY}; }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
a {{ color: {RED}; }}
#controls {{ position: sticky; top: 0; background: #fff; padding: .5em 0; display: flex;
  gap: .5em; align-items: center; flex-wrap: wrap; }}
#at {{ flex: 1; min-width: 12em; }}
#picture {{ overflow-x: auto; border: 1px solid {PALE}; }}
#picture svg {{ display: block; }}
.action {{ cursor: pointer; }}
.action.later {{ opacity: .18; }}
.action:hover rect, .action.here rect, .action:target rect {{ stroke: {INK}; stroke-width: 2; }}
.action.other rect {{ stroke: {RED}; stroke-width: 2; stroke-dasharray: 3 2; }}
#below {{ display: flex; gap: 2em; flex-wrap: wrap; margin-top: 1em; }}
#about {{ margin: 0; min-width: 24em; white-space: pre-wrap; font: inherit; }}
table {{ border-collapse: collapse; }}
td, th {{ border: 1px solid {PALE}; padding: .15em .5em; text-align: left; font-weight: normal; }}
th {{ color: {GREY}; }}
td.free {{ color: {FAINT}; }}
"""

SCRIPT: Final = """
"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const actions = read("actions"), tapes = read("tapes");
  const byId = new Map(actions.map((action, n) => [action.id, n]));
  const part = (id) => document.getElementById(id);
  const svg = document.querySelector("#picture svg");
  const full = svg.viewBox.baseVal.width;
  const refused = document.querySelector(".action.refused");
  const start = refused ? byId.get(refused.id) : actions.length - 1;
  let at = -1, zoom = 1;

  function about(n) {
    for (const old of document.querySelectorAll(".action.other"))
      old.classList.remove("other");
    part("about").textContent = actions[n].words.join("\\n");
    const other = actions[n].other && part(actions[n].other);
    if (other) other.classList.add("other");
  }

  function reached(n) {
    const steps = new Map();
    for (const action of actions.slice(0, n + 1))
      steps.set(action.rank, Math.max(action.step, steps.get(action.rank) ?? -1));
    return steps;
  }

  function slots(n) {
    const steps = reached(n), rows = new Map();
    for (const [rank, stage, microbatch, slot, first, last] of tapes) {
      const key = `${rank} ${stage}`;
      if (!rows.has(key)) rows.set(key, {rank, stage, held: []});
      const row = rows.get(key), step = steps.get(rank) ?? -1;
      row.held[slot] ??= [];
      if (first <= step && (last === null || step <= last)) row.held[slot].push(microbatch);
    }
    const table = document.createElement("table");
    const head = table.insertRow();
    for (const word of ["rank", "stage", "slots: the microbatch that each holds"])
      head.append(Object.assign(document.createElement("th"), {textContent: word}));
    head.lastChild.colSpan = 99;
    const order = [...rows.values()].sort((a, b) => a.rank - b.rank || a.stage - b.stage);
    for (const row of order) {
      const line = table.insertRow();
      line.insertCell().textContent = row.rank;
      line.insertCell().textContent = row.stage;
      for (const held of Array.from(row.held, (one) => one ?? [])) {
        const cell = line.insertCell();
        cell.textContent = held.length ? held.join(" and ") : "free";
        if (!held.length) cell.className = "free";
      }
    }
    part("slots").replaceChildren(table);
  }

  function go(n) {
    if (!actions.length) return;
    at = Math.min(Math.max(n, 0), actions.length - 1);
    part("at").value = at;
    part("count").textContent = `${at + 1} of ${actions.length}: ${actions[at].action}`;
    actions.forEach((action, m) => {
      const drawn = part(action.id);
      drawn.classList.toggle("later", m > at);
      drawn.classList.toggle("here", m === at);
    });
    about(at);
    slots(at);
  }

  function show(id) {
    const pane = part("picture"), box = part(id).getBoundingClientRect();
    pane.scrollLeft += box.left - pane.getBoundingClientRect().left - pane.clientWidth / 2;
  }

  function scale(factor) {
    zoom = Math.min(Math.max(factor, 0.05), 12);
    svg.style.width = `${full * zoom}px`;
    svg.style.height = "auto";
  }

  const fit = () => scale(part("picture").clientWidth / full);
  const step = (by) => { go(at + by); show(actions[at].id); };
  const back = () => { go(start); show(actions[start].id); };
  for (const action of actions) {
    const drawn = part(action.id), n = byId.get(action.id);
    drawn.addEventListener("mouseenter", () => about(n));
    drawn.addEventListener("mouseleave", () => about(at));
    drawn.addEventListener("focus", () => about(n));
    drawn.addEventListener("click", () => go(n));
  }
  part("back").addEventListener("click", () => step(-1));
  part("next").addEventListener("click", () => step(1));
  part("at").addEventListener("input", (event) => {
    go(Number(event.target.value));
    show(actions[at].id);
  });
  part("larger").addEventListener("click", () => scale(zoom * 1.4));
  part("smaller").addEventListener("click", () => scale(zoom / 1.4));
  part("fit").addEventListener("click", fit);
  part("refusal")?.addEventListener("click", back);
  document.addEventListener("keydown", (event) => {
    if (event.target.id === "at" || event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      ArrowLeft: () => step(-1), ArrowRight: () => step(1), Home: () => step(-actions.length),
      End: () => step(actions.length), "+": () => scale(zoom * 1.4), "-": () => scale(zoom / 1.4),
      "0": fit, r: back,
    };
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });
  go(start);
  if (refused) show(refused.id);
})();
"""
