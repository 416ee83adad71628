"""``python -m tests.mutants NAME``: break a rule in this process and see whether anybody notices.

Exit code 0: noticed. 1: survived. 2: the mutant does not fit the source any more.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from tests.mutants.catalog import CONTROLS, MUTANTS, Mutant, Simulated, Tests
from tests.mutants.mutation import Unfit, install

NOTICED, SURVIVED, UNFIT = 0, 1, 2


def main(name: str) -> int:
    """Run one mutant; prints what noticed it."""
    mutant = next(one for one in (*MUTANTS, *CONTROLS) if one.name == name)
    try:
        install(mutant.edits)
        return _hunt(mutant)
    except Unfit as error:
        print(error)
        return UNFIT


def _hunt(mutant: Mutant) -> int:
    if isinstance(mutant.caught_by, Tests):
        return _run_tests(mutant.caught_by)
    return _simulate(mutant.caught_by)


class _Hasty:
    """To notice is enough: hypothesis looks for no smaller example, and remembers none."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("hasty", phases=phases, database=None)
        settings.load_profile("hasty")


def _run_tests(tests: Tests) -> int:
    import pytest

    # In this very process: the broken modules are only here.
    arguments = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests.names]
    code = pytest.main(arguments, plugins=[_Hasty()])
    return NOTICED if code == pytest.ExitCode.TESTS_FAILED else SURVIVED


def _simulate(where: Simulated) -> int:
    from tests.simulation.plan import Fault, Plan, make_plan
    from tests.simulation.run import Looks, run

    def narrowed(seed: int) -> Plan:
        plan = make_plan(seed, faults=False, lives=where.lives)
        faults = tuple(Fault(kind, call, path, 1 + seed % 9) for kind, call, path in where.faults)
        lives = tuple(
            dataclasses.replace(one, dies_by=where.dies_by, faults=faults) for one in plan.lives
        )
        return Plan(where.durability, where.device, where.host, where.disk, where.write, lives)

    images = 0
    for seed in range(where.runs):
        result = run(narrowed(seed), Looks(where.images, lived_on=where.lived_on, lived_on_max=9))
        images += result.ledger.happened["images"]
        if result.ledger.violations:
            kind, detail = result.ledger.violations[0]
            print(f"seed {seed}, {images} images: {kind.value}: {detail}")
            return NOTICED
    print(f"survived {where.runs} runs with {images} images")
    return SURVIVED


if __name__ == "__main__":
    os.environ.pop("CI", None)  # a test that is skipped here says nothing about the mutant
    sys.exit(main(sys.argv[1]))
