from __future__ import annotations

from monarch_slurm.actor.similar_lines import STDERR, STDOUT, SimilarLines


def shown(*lines: tuple[int, str], stream: int = STDOUT) -> list[str]:
    similar = SimilarLines()
    for rank, text in lines:
        similar.add(rank, stream, text, f"[{rank}] ")
    assert similar.bytes <= sum(len(text) for _, text in lines)
    texts = similar.take_all()
    assert (similar.bytes, similar.take_all()) == (0, [])
    assert {which for which, _ in texts} == {stream}
    return [text for _, text in texts]


def test_equal_lines_of_many_ranks_are_one() -> None:
    assert shown(*((rank, "ready") for rank in range(8))) == ["[8 similar log lines] ready"]


def test_numbers_may_differ_over_ranks() -> None:
    lines = [(rank, f"2026-11-29 18:54:10,{500 + rank} INFO x: loss {rank}.25e-3 at 0x7f{rank}a") for rank in range(4)]
    assert shown(*lines) == [f"[4 similar log lines] {lines[0][1]}"]


def test_what_one_rank_says_step_after_step_stays_apart() -> None:
    lines = [(rank, f"step {step}, loss {step + rank / 10}") for step in range(3) for rank in range(2)]
    assert shown(*lines) == [f"[2 similar log lines] step {step}, loss {step + 0.0}" for step in range(3)]


def test_the_same_line_again_and_again_is_one() -> None:
    assert shown(*[(3, "retrying")] * 100, (3, "done")) == ["[100 similar log lines] retrying", "[3] done"]


def test_a_single_line_says_whose_it_is_and_order_is_kept() -> None:
    assert shown((1, "b"), (0, "a"), (2, "c")) == ["[1] b", "[0] a", "[2] c"]


def test_streams_are_not_mixed() -> None:
    similar = SimilarLines()
    similar.add(0, STDOUT, "same", "")
    similar.add(1, STDERR, "same", "")
    assert similar.take_all() == [(STDOUT, "same"), (STDERR, "same")]
