"""The gates that hold a trial beside plain decoding."""

from __future__ import annotations

from made import completed
from made_servers import detail, seen, verdicts

from raytune_eagle import gates
from raytune_eagle.model.trial import Completed, Failed


def answered(texts, compression=1.5, prefix="p"):
    """An outcome with these answers, by prompt."""
    outcome = completed(100)
    first = outcome.requests[0]
    rows = tuple(
        first.model_copy(
            update={
                "prompt_id": f"p{n}",
                "output_hash": text,
                "prefix_hashes": ("x", f"{prefix}{n}", text),
                "compression": compression,
            }
        )
        for n, text in enumerate(texts)
    )
    return outcome.model_copy(update={"requests": rows})


def test_text_that_parts_at_once_is_not_the_models():
    """Whole answers may differ on a GPU; beginnings that differ in most answers are no rounding."""
    plain = answered("abcdefghij")
    assert verdicts(gates.judged(answered("ABCDEFGHIJ"), plain, 0.0).gates)["text"] == "passed"
    garbled = gates.judged(answered("ABCDEFGHIJ", prefix="q"), plain, 0.0)
    assert isinstance(garbled, Failed)
    assert (garbled.failure_class, garbled.failure_phase) == ("text", "gate")
    assert "0% of 10 answers begin (64 characters) as plain decoding's do" in garbled.failure_detail
    assert len(garbled.requests) == 10, "what was measured stays in the record"
    three = answered("abcdefg").requests + answered("ABCDEFGHIJ", prefix="q").requests[7:]
    some = gates.judged(plain.model_copy(update={"requests": three}), plain, 0.0)
    assert verdicts(some.gates)["text"] == "warning"


def test_plain_decoding_that_parts_from_itself_is_asked_no_more_of_others():
    """Where kernels round so differently by batch that plain decoding's own passes part, a trial may part as well."""
    first, ours = answered("abcdefghij"), answered("ABCDEFGHIJ")
    half = ours.requests[:4] + answered("ABCDEFGHIJ", prefix="q").requests[4:]
    trial_ = ours.model_copy(update={"requests": half})
    assert gates.judged(trial_, first, 0.0).failure_class == "text"
    again = tuple(row.model_copy(update={"repeat": 1}) for row in half)
    noisy = first.model_copy(update={"requests": (*first.requests, *again)})
    assert verdicts(gates.judged(trial_, noisy, 0.0).gates)["text"] == "warning"


def test_text_is_compared_only_where_it_can_be():
    """Sampled text, too few prompts, and records that kept no beginnings are not judged."""
    plain, other = answered("abcdefghij"), answered("ABCDEFGHIJ", prefix="q")
    assert "text" not in verdicts(gates.judged(other, plain, 0.7).gates)
    assert "text" not in verdicts(gates.judged(other, None, 0.0).gates)
    assert verdicts(gates.judged(answered("ABC", prefix="q"), plain, 0.0).gates)["text"] == "unknown"
    old = tuple(row.model_copy(update={"prefix_hashes": ()}) for row in plain.requests)
    without = [answered("ABCDEFGHIJ").model_copy(update={"requests": old}), plain.model_copy(update={"requests": old})]
    changed = tuple(row.model_copy(update={"output_hash": row.output_hash.upper()}) for row in old)
    without[0] = without[0].model_copy(update={"requests": changed})
    assert verdicts(gates.judged(*without, 0.0).gates)["text"] == "unknown"


def test_pinned_acceptance_is_told_and_its_text_not_judged():
    """SGLang's simulated acceptance puts made-up tokens into the answers: a warning, instead of a failed trial."""
    found = gates.before(seen(env={"SGLANG_SIMULATE_ACC_LEN": "3.0"}))
    assert verdicts(found)["simulated"] == "warning"
    assert "SGLANG_SIMULATE_ACC_LEN=3.0 pins acceptance" in detail(found, "simulated")
    outcome = answered("ABCDEFGHIJ", compression=20.0, prefix="q").model_copy(update={"gates": found})
    assert gates.judged(outcome, answered("abcdefghij"), 0.0) == outcome
    plain = seen("0516_h200_baseline", speculative=None, env={"SGLANG_SIMULATE_ACC_LEN": "3.0"})
    assert verdicts(gates.before(plain))["simulated"] == "warning", "nor is the text of plain decoding beside it"


def test_repetition_fails_only_beyond_plain_decodings_own():
    """A small model repeats itself by nature: told. A configuration that makes it do so has broken it: failed."""
    fine, looping = answered("abcdefghij"), answered("abcdefghij", compression=20.0)
    assert verdicts(gates.judged(fine, looping, 0.0).gates)["repetition"] == "passed"
    assert gates.judged(looping, fine, 0.0).failure_class == "repetition"
    both = gates.judged(looping, looping, 0.0)
    assert isinstance(both, Completed)
    assert verdicts(both.gates)["repetition"] == "warning"
    assert verdicts(gates.judged(looping, None, 0.0).gates)["repetition"] == "warning", "plain decoding itself"
    assert verdicts(gates.judged(answered("abc"), fine, 0.0).gates)["repetition"] == "unknown"
