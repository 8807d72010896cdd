"""
Tied weights: which matrices are one parameter, and which gradient destination they share.

Two matrices, of one stage or of two stages, are tied if they are one `torch.nn.Parameter`. Every dW
of both matrices adds to one gradient, which updates the parameter once. The gradient is listed only
under the first matrix. The contract refuses two matrices of one parameter that the configuration
does not declare tied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor

from ...backends.protocol import BackendError, Matrix, StageBackend, WgradUnit

Place = tuple[int, str]
"""A matrix: its stage, and its name within the stage."""


@attrs.frozen
class TiedWeights:
    """
    The tied matrices of one process.

    Args:
        names: By stage and tied matrix, the name of the shared gradient destination.
        declared: The matrices that are declared tied.
        sharers: By stage, the other stage that also writes to one of the stage's gradient
            destinations.
        memory: By name, the shared destinations that have been made.
    """

    names: Mapping[int, Mapping[str, str]] = attrs.field(factory=dict)
    declared: frozenset[Place] = frozenset()
    sharers: Mapping[int, int] = attrs.field(factory=dict)
    memory: dict[str, list[Tensor]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, stages: Sequence[StageBackend], declared: Sequence[Sequence[Place]]) -> TiedWeights:
        """
        Find the matrices that are one parameter, and check that these are the declared groups.

        Args:
            stages: The stages of the process.
            declared: Groups of matrices; the matrices of a group are one parameter.

        Raises:
            BackendError: A declared matrix does not exist, is not the same parameter as the rest of
                its group, or has its gradient computed in one product with other matrices. Or a
                stage shares parameters with two other stages.
        """
        found: dict[int, list[Place]] = {}
        units: dict[Place, WgradUnit] = {}
        matrices: dict[Place, Matrix] = {}
        for stage in sorted(stages, key=lambda one: one.index):
            for unit in stage.units:
                for matrix in unit.matrices:
                    place = stage.index, matrix.name
                    units[place], matrices[place] = unit, matrix
                    found.setdefault(id(matrix.parameter), []).append(place)
        for group in declared:
            for place in group:
                if place not in matrices:
                    raise BackendError(f"matrix {place}, which is declared tied, does not exist")
                if matrices[place].parameter is not matrices[group[0]].parameter:
                    raise BackendError(
                        f"{group[0]} and {place} are declared tied but are two parameters; make "
                        "them one torch.nn.Parameter"
                    )
        names: dict[int, dict[str, str]] = {}
        sharers: dict[int, int] = {}
        for group in found.values():
            if len(group) < 2:
                continue
            for place in group:
                if len(units[place].matrices) > 1:
                    raise BackendError(
                        f"{place} is declared tied, but its gradient is computed in one product "
                        f"{units[place].name!r} with other matrices; only a matrix with a separate "
                        "product can be tied"
                    )
                names.setdefault(place[0], {})[place[1]] = "stages.{}.{}".format(*group[0])
            of = sorted({index for index, _ in group})
            for index in of if len(of) > 1 else ():
                others = {sharers.get(index, index), *of} - {index}
                if len(others) > 1:
                    raise BackendError(
                        f"stage {index} has weights tied with the stages {sorted(others)}; "
                        "expected at most one other stage"
                    )
                (sharers[index],) = others
        return cls(names, frozenset(p for group in declared for p in group), sharers)

    def buffers(self, stage: int) -> Mapping[str, str]:
        """
        Return, for each tied matrix of a stage, the name of its shared gradient destination.
        """
        return self.names.get(stage, {})

    def tied(self, stage: int) -> tuple[str, ...]:
        """Return the matrices of a stage that are declared tied."""
        return tuple(name for owner, name in sorted(self.declared) if owner == stage)

    def owned(self, stage: int, matrix: str) -> bool:
        """
        Whether the parameter's gradient is listed under this matrix: it is not tied, or is the
        first of its group.
        """
        name = self.buffers(stage).get(matrix)
        return name is None or name == f"stages.{stage}.{matrix}"

    def units(self, stage: StageBackend) -> dict[str, str]:
        """
        Return, for each unit (deferred matrix product) of a stage that has a shared gradient
        destination, the name of this destination.
        """
        names = self.buffers(stage.index)
        return {
            unit.name: names[unit.matrices[0].name]
            for unit in stage.units
            if unit.matrices[0].name in names
        }

    def with_sharer(self, stage: StageBackend) -> frozenset[str]:
        """Return the units of a stage to whose destination another stage also writes."""
        other = self.sharers.get(stage.index)
        theirs = set(self.buffers(other).values()) if other is not None else set()
        return frozenset(unit for unit, name in self.units(stage).items() if name in theirs)
