"""
Invariants of the device: of graph memory, of enqueued replays, and of reductions.

No replay overwrites memory that a live tape keeps in its capture pool. A caller that has waited for
a replay sees what the replay wrote. Device work that may be unfinished is marked as undrained, or
its action is still in flight. A bucket's reduction is in the state that the contract records, and
its gradients are complete.
"""

from __future__ import annotations

from qeffect.spec.constants import (
    DGRAD_BIT,
    GROUP_BIT,
    NO_RANK,
    NO_SLOT,
    NO_STAGE,
    READ_BITS,
    RESERVED,
    WGRAD_BIT,
)
from qeffect.spec.predicates import Register, implies
from qeffect.spec.world import DONE, NONE, RUNNING

from .words import (
    History,
    Index,
    State,
    Truth,
    awaits,
    domain_of_slot,
    free,
    in_flight,
    live,
    now,
    retained,
)

__all__ = ["HISTORY"]

#: Proved: lemmas about capture memory, completion and reductions.
HISTORY = Register()


# Capture memory


@HISTORY("capture.in-pool", s="slot")
def in_pool(st: State, h: History, s: Index) -> Truth:
    """
    A slot keeps memory in its pool from the check of its forward until its last reader is done.
    """
    unread = (st.moving[s] & READ_BITS) == 0
    kept = retained(st, s) | (live(st, s) & in_flight(st, s)) | (free(st, s) & ~unread)
    claimed = (st.consumers[s] == RESERVED) & (st.held[s] == 0)
    return (kept & (h.in_pool[s] == 1)) | ((h.in_pool[s] == 0) & ((free(st, s) & unread) | claimed))


@HISTORY("capture.tenants", p="pool")
def tenants(st: State, h: History, p: Index) -> Truth:
    """The pool counts the slots that keep memory in it."""
    return (st.tenants[p] == h.tapes[p]) & (0 <= h.tapes[p]) & (h.tapes[p] <= h.slots[p])


@HISTORY("capture.every-slot-seated", s="slot")
def every_slot_seated(st: State, h: History, s: Index) -> Truth:
    """
    Each slot has its own number in its pool. The number is below the pool's count if and only if
    the slot keeps memory.
    """
    p, seat = st.pool_of[s], h.seat[s]
    kept = (seat < h.tapes[p]) == (h.in_pool[s] == 1)
    return (0 <= seat) & (seat < h.slots[p]) & (h.seated[p, seat] == s) & kept


@HISTORY("capture.every-seat-taken", p="pool", i="place")
def every_seat_taken(st: State, h: History, p: Index, i: Index) -> Truth:
    """Every number of a pool belongs to one of its slots."""
    s = h.seated[p, i]
    taken = (s != NO_SLOT) & (st.pool_of[s] == p) & (h.seat[s] == i)
    return implies((0 <= i) & (i < h.slots[p]), taken)


@HISTORY("capture.cursor", p="pool")
def cursor(st: State, h: History, p: Index) -> Truth:
    """The cursor of a pool is the capture rank of the pool's latest replay."""
    return st.cursor[p] == h.last_rank[p]


@HISTORY("capture.own-rank", s="slot")
def own_rank(st: State, h: History, s: Index) -> Truth:
    """The graph replayed last on a slot was captured no later than its pool's last graph."""
    return implies(h.in_pool[s] == 1, h.own_rank[s] <= h.last_rank[st.pool_of[s]])


@HISTORY("capture.latest", s="slot")
def latest(st: State, h: History, s: Index) -> Truth:
    """If a slot keeps memory in a pool, the pool's last replay was of a slot or a refresh."""
    p = st.pool_of[s]
    slot, stage = h.last_replayed[p], h.last_refreshed[p]
    of_slot = (slot != NO_SLOT) & (st.pool_of[slot] == p) & (h.own_rank[slot] == h.last_rank[p])
    rank = st.refresh_rank[stage]
    of_stage = (rank != NO_RANK) & (st.refresh_pool[stage] == p) & (rank == h.last_rank[p])
    return implies(h.in_pool[s] == 1, of_slot | of_stage)


@HISTORY("capture.last-rank", s="slot")
def last_rank(st: State, h: History, s: Index) -> Truth:
    """A slot's consumer mask and its action in flight determine the latest replay of its tape."""
    idle, mask = st.held[s] == 0, st.consumers[s]
    begun = (mask == RESERVED) & in_flight(st, s)
    forwarded = retained(st, s) & awaits(st, s, DGRAD_BIT)
    forward = implies(begun | (forwarded & idle), h.own_rank[s] == st.forward_rank[s])
    deferred = retained(st, s) & idle & (mask & (DGRAD_BIT | WGRAD_BIT) == WGRAD_BIT)
    dgrad = (forwarded & in_flight(st, s)) | deferred
    return forward & implies(dgrad, h.own_rank[s] == st.dgrad_rank[s])


# Completion


@HISTORY("completion.behind", l="link")
def behind(st: State, h: History, l: Index) -> Truth:  # noqa: E741 - a link
    """If a link is marked as joined, the graph stream has waited for all of its work."""
    return implies(st.joined[l] == st.submitted[l], h.behind[l] == 0)


@HISTORY("completion.replays", d="domain")
def replays(st: State, h: History, d: Index) -> Truth:
    """The count of replays is the number of enqueued replays."""
    return st.replays[d] == h.enqueued[d]


@HISTORY("completion.replays-of-tapes", s="slot")
def replays_of_tapes(st: State, h: History, s: Index) -> Truth:
    """
    The graph stream has replayed for each tape that only dW and readers still need, and for each
    tape that another tape's dW has taken.
    """
    mask = st.consumers[s]
    left = (mask != 0) & ((mask & (RESERVED | DGRAD_BIT)) == 0)
    taken = (st.moving[s] & GROUP_BIT) != 0
    return implies(left | taken, 0 < h.enqueued[domain_of_slot(st, s)])


@HISTORY("completion.seen")
def seen(st: State, h: History) -> Truth:
    """A caller that has waited for a tape's latest replay sees the tape's output."""
    l, s = h.link[0], h.slot[0]  # noqa: E741 - a link
    there = st.domain_at[l] == domain_of_slot(st, s)
    return implies(retained(st, s) & there & (st.produced[s] <= st.waited[l]), h.seen[0] == 1)


@HISTORY("completion.saw-all")
def saw_all(st: State, h: History) -> Truth:
    """
    A caller that waited for all replays, or for a tape's dW, has seen all earlier work of the slot.
    """
    l, s = h.link[0], h.slot[0]  # noqa: E741 - a link
    d = domain_of_slot(st, s)
    there = st.domain_at[l] == d
    done = retained(st, s) & (st.consumers[s] & (DGRAD_BIT | WGRAD_BIT) == 0)
    past = (st.replays[d] <= st.waited[l]) | (done & (st.vacated[s] <= st.waited[l]))
    return implies(there & past, h.saw[0] == 1)


@HISTORY("completion.former-work")
def former_work(st: State, h: History) -> Truth:
    """
    A caller that has waited past the time at which a slot became free has waited for all earlier
    work in the slot.
    """
    l, s = h.link[0], h.slot[0]  # noqa: E741 - a link
    there = st.domain_at[l] == domain_of_slot(st, s)
    return implies(there & (st.vacated[s] <= st.waited[l]), h.clear[0] == 1)


@HISTORY("completion.trailing")
def trailing(st: State, h: History) -> Truth:
    """The slot records each end of a transfer for which the graph stream has not waited."""
    l, s = h.link[0], h.slot[0]  # noqa: E741 - a link
    told = (st.ended_on[s] == l) & (st.joined[l] < st.ended_at[s])
    return implies(h.trailing[0] == 1, told) & implies(h.trailing[0] != 0, h.trailing[0] == 1)


@HISTORY("completion.seen-gradients")
def seen_gradients(st: State, h: History) -> Truth:
    """A caller that has waited for a stage's latest dW sees the stage's gradients."""
    l, g = h.link[0], h.stage[0]  # noqa: E741 - a link
    there = st.domain_at[l] == st.domain_of[g]
    return implies(there & (st.landed[g] <= st.waited[l]), h.seen_gradients[0] == 1)


@HISTORY("completion.seen-evaluation", l="link")
def seen_evaluation(st: State, h: History, l: Index) -> Truth:  # noqa: E741 - a link
    """A caller that waited for all replays of a stage's domain waited for its evaluations too."""
    d = st.domain_of[h.stage[0]]
    ours = (st.caller_at[l] == st.caller_at[h.link[0]]) & (st.domain_at[l] == d)
    return implies(ours & (st.replays[d] <= st.waited[l]), h.seen_evaluation[0] == 1)


@HISTORY("completion.evaluation-awaited-by-consumer")
def evaluation_awaited_by_consumer(st: State, h: History) -> Truth:
    """If the consumer has not waited for an evaluation of a final stage, this is marked."""
    g = h.stage[0]
    consumes = (st.final[g] == now(st, g)) & (st.caller_at[h.link[0]] == st.consumer[0])
    waited = st.unwaited[st.domain_of[g]] == 0
    return implies(consumes & waited, h.seen_evaluation[0] == 1)


@HISTORY("completion.device", d="domain")
def device(st: State, h: History, d: Index) -> Truth:
    """Device work that may be unfinished is marked undrained, or its action is in flight."""
    s, g = h.beginner[d], h.refresher[d]
    slot = (s != NO_SLOT) & in_flight(st, s) & (domain_of_slot(st, s) == d)
    stage = (g != NO_STAGE) & (st.refreshing[g] != 0) & (st.domain_of[g] == d)
    e = h.evaluator[d]
    evaluation = (e != NO_STAGE) & (st.evaluating[e] != 0) & (st.domain_of[e] == d)
    return implies((h.device[d] != 0) & (st.undrained[d] == 0), slot | stage | evaluation)


# Reduction


@HISTORY("reduction.stations", b="bucket")
def stations(st: State, h: History, b: Index) -> Truth:
    """
    Each bucket's reduction is in the state that the contract records; its gradients are complete.
    """
    none, running, done = (h.reduction[b] == k for k in (NONE, RUNNING, DONE))
    s, t = st.stage_at[b], st.tied_at[b]
    whole = (st.wgrads[s] == st.cells[s]) & (st.wgrads[t] == st.cells[t])
    return (
        (none | running | done)
        & (running == (st.reducing[b] != 0))
        & (done == (st.reduced[b] == now(st, s)))
        & (none | whole)
    )


@HISTORY("reduction.counted")
def counted(st: State, h: History) -> Truth:
    """The count of reductions is the number of started reductions."""
    return (st.started[0] == h.begun[0]) & (0 <= h.begun[0])


@HISTORY("reduction.none-before-the-first", b="bucket")
def none_before_the_first(st: State, h: History, b: Index) -> Truth:
    """If no reduction of the epoch is counted, no bucket's reduction has started."""
    return implies(h.begun[0] == 0, h.reduction[b] == NONE)


@HISTORY("epoch.walks")
def walks(st: State, h: History) -> Truth:
    """The contract counts the completed walks (passes over the microbatches)."""
    return (st.walk[0] == h.walks[0]) & (0 <= h.walks[0])


@HISTORY("completion.one-consumer", g="stage")
def one_consumer(st: State, h: History, g: Index) -> Truth:
    """The stream that finalized a stage in this epoch is the consumer of the gradients."""
    named = (st.named[0] == now(st, g)) & (st.consumer[0] == st.caller_at[h.finalized_by[g]])
    return implies(st.final[g] == now(st, g), named)


@HISTORY("completion.finalized-after-gradients", g="stage")
def finalized_after_gradients(st: State, h: History, g: Index) -> Truth:
    """The stream that finalized a stage in this epoch has waited for its latest dW."""
    l = h.finalized_by[g]  # noqa: E741 - a link
    there = st.domain_at[l] == st.domain_of[g]
    return implies(st.final[g] == now(st, g), there & (st.landed[g] <= st.waited[l]))


@HISTORY("completion.update-runs", d="domain")
def update_runs(st: State, h: History, d: Index) -> Truth:
    """If an update may still run in parallel with a graph stream, it is marked, with its stream."""
    told = (st.unawaited[d] != 0) & (st.updater[0] == h.updated_on[0])
    return implies(h.updating[d] != 0, told)


@HISTORY("completion.readers", g="stage")
def readers(st: State, h: History, g: Index) -> Truth:
    """The contract records which stages' weights are being read."""
    none, running, done = (h.weights_reader[g] == k for k in (NONE, RUNNING, DONE))
    return (none | running | done) & (running == (st.weights_read[g] != 0))


@HISTORY("completion.reader-awaited-by-consumer", g="stage")
def reader_awaited_by_consumer(st: State, h: History, g: Index) -> Truth:
    """The stream that waited for a reader of the weights is the recorded consumer."""
    ours = st.consumer[0] == st.caller_at[h.reader_awaited_by[g]]
    return implies(h.weights_reader[g] == DONE, (st.named[0] == now(st, g)) & ours)


@HISTORY("completion.gradients-readers", g="stage")
def gradients_readers(st: State, h: History, g: Index) -> Truth:
    """The contract records which stages' gradients are being read."""
    none, running, done = (h.gradients_reader[g] == k for k in (NONE, RUNNING, DONE))
    return (none | running | done) & (running == (st.gradients_read[g] != 0))


@HISTORY("completion.gradients-awaited-by-consumer", g="stage")
def gradients_awaited_by_consumer(st: State, h: History, g: Index) -> Truth:
    """The consumer is the stream that reads gradients, or that waited for their reader."""
    named = st.named[0] == now(st, g)
    ours = st.consumer[0] == st.caller_at[h.gradients_awaited_by[g]]
    return implies(h.gradients_reader[g] == RUNNING, named) & implies(
        h.gradients_reader[g] == DONE, named & ours
    )


@HISTORY("completion.read-gradients-whole", g="stage")
def read_gradients_whole(st: State, h: History, g: Index) -> Truth:
    """While gradients of a stage are being read, every dW of the stage has run."""
    return implies(st.gradients_read[g] != 0, st.wgrads[g] == st.cells[g])


@HISTORY("completion.read-shared-whole", needs="arena", g="stage")
def read_shared_whole(st: State, h: History, g: Index) -> Truth:
    """
    If another stage shares a destination with a stage, every dW of the other stage has run while
    gradients of the stage are being read.
    """
    t = st.sharer_of[g]
    return implies(st.gradients_read[g] != 0, st.wgrads[t] == st.cells[t])


@HISTORY("completion.read-gradients-reduced", needs="reduction", g="stage", b="bucket")
def read_gradients_reduced(st: State, h: History, g: Index, b: Index) -> Truth:
    """While gradients are being read, every bucket is reduced."""
    return implies(st.gradients_read[g] != 0, st.reduced[b] == now(st, g))


@HISTORY("completion.behind-update", l="link")
def behind_update(st: State, h: History, l: Index) -> Truth:  # noqa: E741 - a link
    """
    If a caller may run in parallel with the latest update, the caller is marked, and the update's
    stream is recorded.
    """
    told = (st.unseen[l] != 0) & (st.updater[0] == h.updated_on[0])
    return implies(h.behind_update[l] != 0, told)


@HISTORY("completion.update-on-its-stream")
def update_on_its_stream(st: State, h: History) -> Truth:
    """The contract records the stream of the update in flight."""
    return implies(st.optimizing[0] != 0, st.updater[0] == h.updated_on[0])


@HISTORY("completion.awaited-by-consumer", needs="reduction", b="bucket")
def awaited_by_consumer(st: State, h: History, b: Index) -> Truth:
    """The stream that waited for a bucket's reduction is the consumer of the gradients."""
    named = st.named[0] == now(st, st.stage_at[b])
    ours = st.consumer[0] == st.caller_at[h.awaited_by[b]]
    return implies(h.reduction[b] == DONE, named & ours)
