"""
Tied weights: which matrices are one parameter, and the destination that their products share.

Two matrices, of one stage or of two stages, are tied if they are one `torch.nn.Parameter`. The
gradient of tied matrices is one sum, written by every dW of both, and updates the parameter once.
The first matrix owns the gradient; the second matrix has none. The contract refuses two matrices of
one parameter that the configuration does not declare tied.
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
        names: By stage and matrix, the name of the shared gradient destination; contains only tied
            matrices.
        declared: The matrices that are declared tied.
        sharers: By stage, the other stage that also writes one of this stage's destinations.
        memory: By name, the shared destinations that were made for the first matrix of a group.
    """

    names: Mapping[int, Mapping[str, str]] = attrs.field(factory=dict)
    declared: frozenset[Place] = frozenset()
    sharers: Mapping[int, int] = attrs.field(factory=dict)
    memory: dict[str, list[Tensor]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, stages: Sequence[StageBackend], declared: Sequence[Sequence[Place]]) -> TiedWeights:
        """
        Find the matrices that are one parameter, and compare them with the declared groups.

        Args:
            stages: The stages of the process.
            declared: Groups of matrices; the matrices of a group are one parameter.

        Raises:
            BackendError: A declared matrix does not exist, is another parameter than the rest of
                its group, or is computed in one product with other matrices; or a stage shares
                parameters with two other stages.
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
        Return, by matrix of a stage, the name of the destination that the matrix shares with
        another matrix.
        """
        return self.names.get(stage, {})

    def tied(self, stage: int) -> tuple[str, ...]:
        """Return the matrices of a stage that are declared tied."""
        return tuple(name for owner, name in sorted(self.declared) if owner == stage)

    def owned(self, stage: int, matrix: str) -> bool:
        """Whether a matrix owns its parameter: it is not tied, or is the first of its group."""
        name = self.buffers(stage).get(matrix)
        return name is None or name == f"stages.{stage}.{matrix}"

    def units(self, stage: StageBackend) -> dict[str, str]:
        """
        Return, by unit of a stage, the name of the destination that the unit shares with another
        unit.
        """
        names = self.buffers(stage.index)
        return {
            unit.name: names[unit.matrices[0].name]
            for unit in stage.units
            if unit.matrices[0].name in names
        }

    def with_sharer(self, stage: StageBackend) -> frozenset[str]:
        """Return the units of a stage whose destination another stage also writes."""
        other = self.sharers.get(stage.index)
        theirs = set(self.buffers(other).values()) if other is not None else set()
        return frozenset(unit for unit, name in self.units(stage).items() if name in theirs)
