"""The page's text about the paper's tables and the peers, from made-up reports."""

from __future__ import annotations

from tests.docs.tables_block import models, peers, tables
from tests.runtime.report_samples import models_report, peers_report, tables_report


def test_every_table_shows_ours_beside_the_papers() -> None:
    """One paragraph, each table that has rows, and the missed goals."""
    text = "\n\n".join(tables([("t.json", tables_report())], lambda _: "a machine"))
    assert "(t.json; 5 fresh starts of all ranks; a machine)" in text
    assert (
        "| h4096-s256-m8 | il | initial | 102.00 / 10.00 | 10.20x | 89.469 / 47.329 | 1.895x |"
    ) in text
    assert "| 4.12x | 1.00x | 10.6 | +0.00 | 72 | 20 | 0.75, - | 2 | 52 | 54.13, 1.75x |" in text
    assert "| 2 | 5.00 (35.12) | 102,400 | 20 (12) |" in text
    assert "| 0, 3 (2) | 0.75 (0.05) |" in text
    assert (
        "| language | replays, il to replays, izb | 10.00 | 5.00 | 2.00x | 100.0% (68.5%) |" in text
    )
    assert "0 of 160 tensors" in text
    assert "2 of 5 goals of these tables are met. Missed:" in text


def test_without_a_report_nothing_is_said() -> None:
    """The block stays empty."""
    assert tables([], lambda _: "") == peers([], lambda _: "") == models([], lambda _: "") == []


def test_models_have_their_rates_and_what_failed() -> None:
    """Native's rate, twice that rate in half the time, and an error in place of numbers."""
    text = "\n\n".join(models([("m.json", models_report())], lambda _: "a machine"))
    assert "**Whole models over 2 ranks** (m.json; a machine)." in text
    assert "| 400.0 (400.0 to 400.0) | 337 | 17.0% | 1.00x | 0.62x | - | - | 0.0 | - |" in text
    assert "(200.0 to 200.0) | 673 | 34.0% | 2.00x | 1.25x | - | - | 0.0 | 0 of 10 |" in text
    assert f"| 8b-s4096-m8 | il | native |{' - |' * 8} failed: no memory |" in text


def test_models_that_were_profiled_have_their_time_by_kind() -> None:
    """The busiest rank's, in one table of all rows, with the longest kind first."""
    report = models_report()
    kinds = {"copies": 2.0, "attention": 30.0}
    report["derived"]["rows"][1]["kinds"] = kinds
    text = "\n\n".join(models([("m.json", report)], lambda _: "a machine"))
    assert "| cell | schedule | side | attention | copies |" in text
    assert "| 1b-s4096-m8 | il | one launch | 30.0 | 2.0 |" in text


def test_a_mode_that_is_wrong_or_failed_is_shown_as_that() -> None:
    """Beside the correct modes, and in the capability table."""
    text = "\n\n".join(peers([("p.json", peers_report())], lambda _: "a machine"))
    assert (
        "| h4096-s256-m8 | one launch | il | bf16 | - | 10.00 | 10.00x | 4.00x | 1.67x | - | "
        "same bits |" in text
    )
    assert (
        "| megatron local | il | bf16 | - | 20.00 | 5.00x | 2.00x | 1.82x | 0.9000 | wrong |"
        in text
    )
    assert "| failed: RuntimeError: no capture |" in text
    assert (
        "| Megatron delayed dW | none | delayed dW asked for | refused before training: no |"
        in text
    )
    assert "3 of 4 goals of these tables are met. Missed:" in text
