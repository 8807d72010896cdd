"""
The actions of a re-enactment: refresh, F, dI and dW, with arguments for what a faulty runtime does
differently.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from qeffect.destinations import Destination

from .transcript import Transcript

__all__ = ["Actions"]


class Actions(Transcript):
    """The actions that a re-enactment can run on its contract."""

    def refresh(
        self,
        stage: int = 0,
        *,
        filled: Iterable[str] | None = None,
        weights_of: int | None = None,
        caller: Hashable = "main",
        joined: bool | None = True,
    ) -> None:
        """
        Refresh a stage's weight cache.

        Args:
            stage: The stage whose cache is refreshed.
            filled: Matrices whose caches the device reports as filled; by default all.
            weights_of: The epoch of the weights in the caches; by default the current epoch.
            caller: The stream that made the weights.
            joined: Whether the graph stream waits for the caller's stream; None if the re-enactment
                makes the call `join` itself.
        """
        link = self._hand_over(stage, caller, joined)
        name = self._name(f"s{stage}", self.contract.epoch)
        ticket = self.step(
            name,
            lambda: self.contract.check_refresh(stage, link),
            f"refresh {_not(joined)}".strip(),
        )
        fills = self._fills(stage, filled, asked=True, of=weights_of)
        self._redeem(name, ticket, filled=fills)

    def evaluation(
        self, stage: int = 0, *, updates: int = 0, cached: bool = True, caller: Hashable = "main"
    ) -> None:
        """
        Run an evaluation: a forward without a later dI and dW.

        Args:
            stage: The stage that is evaluated.
            updates: Number of scaling updates that the device made during the evaluation.
            cached: Whether the evaluation reads the quantized weight cache.
            caller: The stream that filled the inputs of the evaluation.
        """
        link = self._hand_over(stage, caller, True)
        name = self._name(f"s{stage}", self.contract.epoch)
        ticket = self.step(
            name, lambda: self.contract.check_evaluation(stage, link, cached), "evaluate"
        )
        detail = "" if updates == 0 else f"made {updates} scaling updates"
        self._redeem(name, ticket, detail=detail, updates=updates)
        self.contract.wait(link)

    def invalidate(self, stage: int = 0) -> None:
        """Invalidate a stage's weight cache."""
        self.step(f"s{stage}", lambda: self.contract.invalidate(stage), "invalidate")

    def forward(
        self,
        microbatch: int,
        *,
        stage: int = 0,
        slot: int | None = None,
        invocation: int = 0,
        token: int | None = None,
        refresh: bool = False,
        filled: Iterable[str] | None = None,
        draws: int | None = None,
        caller: Hashable = "main",
        joined: bool | None = True,
    ) -> None:
        """
        Run F.

        Args:
            microbatch: The microbatch of F.
            stage: The stage of F.
            slot: The slot (set of buffers), if the runtime chooses it; by default the contract
                chooses.
            invocation: Number of this call of the stage's block, from 0.
            token: Number of scaling updates that the device counts; by default the contract's
                number.
            refresh: Whether F also refreshes the weight cache.
            filled: Matrices whose caches the device reports as filled; by default those that F was
                asked to fill.
            draws: The random generator's position when F began to draw; by default after every
                earlier F.
            caller: The stream that filled the inputs of F.
            joined: Whether the graph stream waits for the caller's stream; None if the re-enactment
                makes the call `join` itself.
        """
        key = self.key(microbatch, stage, invocation)
        link = self._hand_over(stage, caller, joined)
        details = (
            "refreshes" if refresh else "",
            f"in slot {slot}" if slot is not None else "",
            _after(token),
            _not(joined),
        )
        name = self._action("F", key)
        ticket = self.step(
            name,
            lambda: self.contract.check_forward(
                key, slot=slot, token=token, link=link, refresh=refresh
            ),
            " ".join(filter(None, details)),
        )
        fills = self._fills(stage, filled, asked=refresh)
        self.caller.scales[key.cell] = self.contract.token(stage)
        detail = "" if draws is None else f"drew from position {draws}"
        drew = self.caller.draw(key) if draws is None else draws
        ref = self._redeem(name, ticket, detail=detail, filled=fills, updates=1, draws=drew)
        self.caller.refs[key.cell] = ref
        self.contract.wait(link)
        self.contract.wait(self.caller.link(stage, "main"))

    def dgrad(
        self,
        microbatch: int,
        *,
        stage: int = 0,
        queued: Iterable[str] | None = None,
        bound: tuple[Destination, ...] | None = None,
        invocation: int = 0,
        token: int | None = None,
        updates: int = 1,
        scales_of: int | None = None,
        draws_of: int | None = None,
        weight: tuple[int, int] | None = None,
        tape_of: int | None = None,
        caller: Hashable = "main",
        joined: bool | None = True,
    ) -> None:
        """
        Bind the gradient destinations and run dI.

        Args:
            microbatch: The microbatch of dI.
            stage: The stage of dI.
            queued: Matrices whose weight gradients dI deferred; by default all.
            bound: The gradient destinations to bind; by default the configured ones.
            invocation: Number of this call of the stage's block, from 0.
            token: Number of scaling updates that the device counts; by default the contract's
                number.
            updates: Number of scaling updates that the device made during dI.
            scales_of: The microbatch whose scales dI used; by default that of dI.
            draws_of: The microbatch whose random numbers the recomputation drew; by default that of
                dI.
            weight: The factor of the gradient, as (numerator, denominator); by default the same for
                every microbatch, so that all factors add up to the declared sum.
            tape_of: The microbatch whose tape (data of its F) dI uses; by default dI uses the tape
                of its own microbatch.
            caller: The stream that filled the inputs of dI.
            joined: Whether the graph stream waits for the caller's stream; None if the re-enactment
                makes the call `join` itself.
        """
        key = self.key(microbatch, stage, invocation)
        ref = self.ref(key if tape_of is None else self.key(tape_of, stage, invocation))
        name = self._action("I", key)
        detail = "" if bound is None else f"writes to {_where(bound)}"
        self.step(name, lambda: self.contract.bind(key, bound), f"bind {detail}".strip())
        link = self._hand_over(stage, caller, joined)
        taken = (
            _after(token),
            "" if tape_of is None else f"with the tape of microbatch {tape_of}",
            _not(joined),
        )
        ticket = self.step(
            name,
            lambda: self.contract.check_dgrad(key, ref, token=token, link=link),
            " ".join(filter(None, taken)),
        )
        given = self._matrices(stage) if queued is None else tuple(queued)
        scaled = key if scales_of is None else self.key(scales_of, stage, invocation)
        scales = self.caller.scales[scaled.cell]
        details = (
            "" if queued is None else f"queued {', '.join(given) or 'nothing'}",
            "" if updates == 1 else f"made {updates} scaling updates",
            "" if scales_of is None else f"with the scales of microbatch {scales_of}",
            "" if draws_of is None else f"drew from after microbatch {draws_of}",
            "" if weight is None else f"with weight {weight[0]}/{weight[1]}",
        )
        detail = " ".join(filter(None, details))
        if draws_of is None:
            draws = self.caller.draws.get(key.cell)
        else:
            draws = self.caller.draws[self.key(draws_of, stage, invocation).cell] + 1
        weight = self.caller.weight(stage) if weight is None else weight
        told = {"updates": updates, "scales": scales, "draws": draws, "weight": weight}
        self._redeem(name, ticket, given, detail, **told)
        self.contract.wait(link)
        self.contract.wait(self.caller.link(stage, "main"))

    def wgrad(
        self,
        microbatch: int,
        *,
        stage: int = 0,
        overwrites: bool | None = None,
        covered: Iterable[str] | None = None,
        into: tuple[Destination, ...] | None = None,
        invocation: int = 0,
        stream: Hashable | None = None,
        tape_of: int | None = None,
    ) -> None:
        """
        Run dW.

        Args:
            microbatch: The microbatch of dW.
            stage: The stage of dW.
            overwrites: Whether dW replaces the buffer's content instead of adding to it; by default
                as the contract requires.
            covered: Matrices whose gradients dW wrote; by default all.
            into: The destinations that dW writes; by default the configured ones.
            invocation: Number of this call of the stage's block, from 0.
            stream: The domain on whose graph stream dW is launched; by default the stage's domain.
            tape_of: The microbatch whose retained work dW uses; by default that of dW.
        """
        key = self.key(microbatch, stage, invocation)
        ref = self.ref(key if tape_of is None else self.key(tape_of, stage, invocation))
        link = self._hand_over(stage, "main", True)
        if stream is not None:
            link = self.contract.link("main", stream)
        name = self._action("W", key)
        details = (
            "" if overwrites is None else "overwrites" if overwrites else "accumulates",
            "" if into is None else f"writes to {_where(into)}",
            "" if stream is None else f"on stream {stream}",
            "" if tape_of is None else f"with the work of microbatch {tape_of}",
        )
        ticket = self.step(
            name,
            lambda: self.contract.check_wgrad(
                key, ref, destination=into, first=overwrites, link=link
            ),
            " ".join(filter(None, details)),
        )
        given = self._matrices(stage) if covered is None else tuple(covered)
        detail = "" if covered is None else f"covered {', '.join(given) or 'nothing'}"
        self._redeem(name, ticket, given, detail)
        self.contract.wait(link)

    def backward(self, microbatch: int, *, stage: int = 0, invocation: int = 0) -> None:
        """Run dI and then dW of a microbatch."""
        self.dgrad(microbatch, stage=stage, invocation=invocation)
        self.wgrad(microbatch, stage=stage, invocation=invocation)


def _where(destinations: tuple[Destination, ...]) -> str:
    return " ".join(f"{d.matrix}@{d.address:#x}" for d in destinations)


def _after(token: int | None) -> str:
    return "" if token is None else f"after {token} scaling updates"


def _not(joined: bool | None) -> str:
    return "without waiting for its caller" if joined is False else ""
