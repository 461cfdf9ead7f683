"""Which layers stay within a memory budget, and messages about it."""

from typing import Any

import pytest

from outrider.models.llm.memory_plan import GIB, MemoryPlan, Unit, plan_memory

MIB = 2**20


def plan(budget: int, *, stored: int = 10, computed: int = 10, head: int | None = None, **options: Any) -> MemoryPlan:
    """Plan eight layers of some MiB; embeddings take 5, keys and values 3, buffers 2."""
    units = [Unit(stored_bytes=stored * MIB, computed_bytes=computed * MIB) for _ in range(8)]
    if head is not None:
        units.append(Unit(stored_bytes=head * MIB, computed_bytes=head * MIB, is_head=True))
    sizes = {"ends_bytes": 5 * MIB, "token_bytes": MIB, "budget_tokens": 3, "staging_bytes": 2 * MIB}
    return plan_memory(units, budget_bytes=budget * MIB, **sizes, **options)


def places(plan: MemoryPlan) -> str:
    return "".join(unit.place[0] for unit in plan.units)


# r resident, k kept as stored, s streamed. The least: 5 + 3 + 2 + two slots of 10 = 30 MiB.
@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (30, "ssssssss"),
        (39, "ssssssss"),
        (40, "rsssssss"),
        (50, "rsssrsss"),
        (79, "rsrsrsrs"),
        (87, "rrrsrsrs"),  # one MiB less than all resident, without slots
        (88, "rrrrrrrr"),
        (1000, "rrrrrrrr"),
    ],
)
def test_layers_stay_as_the_budget_allows_and_evenly(budget: int, expected: str) -> None:
    chosen = plan(budget)
    assert places(chosen) == expected
    assert chosen.planned_bytes <= budget * MIB
    assert chosen.streamed_bytes == expected.count("s") * 10 * MIB


# Stored in half the bytes of the computation. The least: 5 + 3 + 2 + two slots of 20 = 50 MiB.
@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (50, "ssssssss"),
        (60, "ksssssss"),
        (90, "ksksksks"),
        (130, "kkkkkkkk"),
        (140, "rkkkkkkk"),
        (160, "rkrkrkkk"),
        (167, "rkrkrkkk"),
        (168, "rrrrrrrr"),
    ],
)
def test_layers_are_kept_as_stored_before_any_is_resident(budget: int, expected: str) -> None:
    assert places(plan(budget, stored=10, computed=20)) == expected


def test_on_an_accelerator_layers_are_kept_in_the_hosts_memory() -> None:
    chosen = plan(40, host_bytes=35 * MIB)
    assert [places(chosen).count(place) for place in "rks"] == [1, 3, 4]
    assert chosen.planned_bytes <= 40 * MIB  # kept layers aren't on the device
    assert places(plan(30, host_bytes=0)) == "ssssssss"


def test_the_head_stays_if_it_fits_and_streams_if_not() -> None:
    assert places(plan(37, head=7)) == "ssssssssr"
    assert places(plan(36, head=7)) == "sssssssss"
    # A head larger than a layer also makes the slots larger: it streams only if that is less.
    assert places(plan(60, head=30)) == "ssssssssr"
    with pytest.raises(ValueError, match=f"at least {60 / 1024:.4f}"):
        plan(59, head=30)


def test_a_budget_that_is_too_small_names_the_least_part_by_part() -> None:
    with pytest.raises(ValueError, match=r"target.memory_budget_gib is 0.0283.*at least 0.0293 GiB") as error:
        plan(29)
    parts = ("embeddings and norms 0.00488", "2 slots .* 0.0195", "buffers .* 0.00195", "keys and values of 3 tokens 0.00293")
    for part in parts:
        error.match(part)
    error.match(r"target.budget_tokens \(3\)")
    assert plan(30).planned_bytes == 30 * MIB  # the least that the message names works


def test_the_named_least_works_when_typed_in() -> None:
    """The figure has three digits: rounded down, it would be refused again."""
    for layer in (7, 11, 13):
        with pytest.raises(ValueError, match="at least") as error:
            plan(1, computed=layer)
        least = float(str(error.value).split("at least ")[1].split(" GiB")[0])
        units = [Unit(stored_bytes=10, computed_bytes=layer * MIB) for _ in range(8)]
        plan_memory(
            units,
            budget_bytes=int(least * GIB),
            ends_bytes=5 * MIB,
            token_bytes=MIB,
            budget_tokens=3,
            staging_bytes=2 * MIB,
        )


def test_the_line_at_load_says_what_stays_and_what_a_pass_costs() -> None:
    assert plan(50).describe(1e9) == (
        "8 layers: 2 stay, 6 stream (0.0586 GiB a pass, 0.063 s at the 1 GB/s measured); 0.0488 of 0.0488 GiB"
    )
    assert plan(50).describe() == "8 layers: 2 stay, 6 stream (0.0586 GiB a pass); 0.0488 of 0.0488 GiB"
    assert plan(60, computed=20).describe(1e9).startswith("8 layers: 1 kept as stored, 7 stream (")
    assert plan(36, head=7).describe(1e9).startswith("8 layers: 8 stream, the head streams (")
    assert plan(100).describe() == "8 layers: 8 stay (a pass reads no file); 0.0859 of 0.0977 GiB"
