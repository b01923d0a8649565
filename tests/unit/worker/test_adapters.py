"""Foreign programs' output, as their own logging code prints it, read back."""

import math
import re
import time

import pytest

from eagle3_core.contract.params import ExternalParams
from eagle3_core.errors import BadInput
from worker.adapters.choose import choose_adapter
from worker.adapters.reading import MAX_COUNT, Reading
from worker.follow import LineSplitter

SPECULATORS_09 = """\
[18:10:32] INFO     Training epoch 1/2 started                    trainer.py:610
           INFO     train/loss=5.123, train/loss_0=2.100,         trainer.py:545
                    train/full_acc_0=0.123,                                     \x20
                    train/full_acc_1=0.100, profile/fetch_ms=1.000,             \x20
                    profile/tokens_per_s=1.23e+04, epoch=0,                     \x20
                    lr/Muon=0.001, lr/AdamW=1.00e-04,                           \x20
                    global_step=0                                               \x20
           INFO     train/loss=nan, train/loss_0=nan,             trainer.py:545
                    train/full_acc_0=0.000,                                     \x20
                    train/full_acc_1=0.000, profile/fetch_ms=1.000,             \x20
                    profile/tokens_per_s=1.23e+04, epoch=0, lr=0.001,           \x20
                    global_step=1                                               \x20
Epoch 0 100% \u2501\u2501\u2501\u2501\u2501\u2501\u2501\u2501 2/2  [ 0:00:00 < 0:00:00 , ? it/s ]
           INFO     Training epoch 1/2 completed                  trainer.py:612
           INFO     Validation epoch 1/2 started                  trainer.py:628
           INFO     val/loss_epoch=4.900,                         trainer.py:585
                    val/full_acc_0_epoch=0.200, epoch=0                         \x20
           INFO     Validation epoch 1/2 completed                trainer.py:630
[18:10:33] INFO     Training epoch 2/2 started                    trainer.py:610
           INFO     train/loss=4.000, train/full_acc_0=0.250,     trainer.py:545
                    profile/tokens_per_s=900.000, epoch=1, lr=0.001,            \x20
                    global_step=2                                               \x20
"""

SPECULATORS_03 = """\
[09:00:00] INFO     No previous checkpoint found. Starting from     trainer.py:84
                    scratch.                                                    \x20
           INFO     Training epoch 1/1 started                     trainer.py:241
           INFO     train/loss=6.500, train/full_acc_0=0.010,      trainer.py:190
                    train/cond_acc_0=0.010, epoch=0, lr=1.00e-04                \x20
           INFO     train/loss=6.250, train/full_acc_0=0.020,      trainer.py:190
                    train/cond_acc_0=0.020, epoch=0, lr=1.00e-04                \x20
           INFO     Training epoch 1/1 completed                   trainer.py:243
"""

SPECFORGE = """\
step 50: {'loss': 4.25, 'plosses': [2.5, 1.75], 'acces': [0.41, 0.33], 'lr': 9.5e-05, 'perf/data_wait_time_s': 0.01}
step 100: {'loss': nan, 'acces': [nan, 0.0], 'lr': 9e-05}
step 100: {'eval/loss': 3.9, 'eval/acc': 0.5}
"""

HUGGING_FACE = (
    "\r  0%|          | 0/12 [00:00<?, ?it/s]\r      \r{'loss': '4.174', 'grad_norm': '0.874', 'learning_rate': "
    "'4.583e-05', 'epoch': '0.3333'}\n"
    "\r 17%|\u2588\u258b        | 2/12 [00:00<00:05,  2.02it/s]\r      \r{'loss': 4.0, 'grad_norm': 0.9, "
    "'learning_rate': 3.75e-05, 'epoch': 0.6667}\n"
    "\r 33%|\u2588\u2588\u2588\u258e      | 4/12 [00:02<00:04, 1.9it/s]\r 50%|\u2588  | 6/12 [00:03<00:03, 2.0it/s]\n"
    "\rWriting model shards: 100%|\u2588\u2588| 1/1 [00:00<00:00, 471.85it/s]\n"
    "\r  0%|          | 0/3 [00:00<?, ?it/s]\x1b[A\r     \r\x1b[A{'eval_loss': '3.9', 'eval_runtime': '0.0062', "
    "'epoch': '1'}\n"
    "\r100%|\u2588\u2588| 12/12 [00:06<00:00, 2.0it/s]\n"
    "{'train_runtime': '6.1', 'train_loss': '4.17', 'epoch': '2'}\n"
)


def lines(text: str) -> list[str]:
    splitter = LineSplitter()
    return [*splitter.feed(text.encode()), *splitter.flush()]


def readings(text: str, progress: str | dict[str, str] = "auto") -> list[Reading]:
    adapter = choose_adapter(progress, lambda code, message: None)
    return [reading for line in lines(text) if (reading := adapter.read(line)) is not None]


@pytest.mark.parametrize("progress", ["auto", "speculators"])
def test_speculators_0_9(progress: str) -> None:
    read = readings(SPECULATORS_09, progress)
    steps = [one for one in read if one.loss is not None]
    assert [(one.step, one.epoch, one.epochs) for one in steps] == [(1, 0, 2), (2, 0, 2), (3, 1, 2)]
    assert (steps[0].loss, steps[0].accuracy, steps[0].lr, steps[0].tokens_per_s) == (5.123, (0.123, 0.1), 1e-3, 12300)
    assert math.isnan(steps[1].loss or 0)
    assert [one.steps for one in steps] == [None, None, 4]  # an epoch's length is known once it was seen
    assert [one.phase for one in read if one.phase] == ["training", "validating", "training"]
    [validated] = [one for one in read if one.validation]
    assert (validated.epoch, validated.validation) == (0, {"loss": 4.9, "full_acc_0": 0.2})
    assert [one.epoch for one in read if one.epoch_over] == [0]


@pytest.mark.parametrize("progress", ["auto", "speculators"])
def test_speculators_0_3_counts_its_steps(progress: str) -> None:
    read = readings(SPECULATORS_03, progress)
    steps = [one for one in read if one.loss is not None]
    assert [(one.step, one.loss, one.lr) for one in steps] == [(1, 6.5, 1e-4), (2, 6.25, 1e-4)]
    assert (read[-1].steps, read[-1].finished) == (2, True)


@pytest.mark.parametrize("progress", ["auto", "specforge"])
def test_specforge(progress: str) -> None:
    first, second, evaluated = readings(SPECFORGE, progress)
    assert (first.step, first.loss, first.accuracy, first.lr) == (50, 4.25, (0.41, 0.33), 9.5e-5)
    assert second.step == 100 and math.isnan(second.loss or 0)
    assert evaluated.loss is None and evaluated.values == {"eval/loss": 3.9, "eval/acc": 0.5}


@pytest.mark.parametrize("progress", ["auto", "hf_trainer"])
def test_hugging_face_trainer(progress: str) -> None:
    read = readings(HUGGING_FACE, progress)
    assert {one.steps for one in read if one.step} == {12}
    assert [one.loss for one in read if one.loss is not None] == [4.174, 4.0]
    assert 6 in {one.step for one in read} and 3 not in {one.step for one in read}
    assert [one.epochs for one in read if one.step == 2] == [2]
    [validated] = [one for one in read if one.validation]
    assert (validated.epoch, validated.validation["loss"]) == (0, 3.9)  # type: ignore[index]
    assert [one.finished for one in read][-1]


def test_a_bar_alone() -> None:
    [one] = readings("Sorting:  30%|###       | 30/100 [00:30<01:10,  1.00s/batch, loss=2.5, v=1]\n")
    assert (one.step, one.steps, one.eta_s, one.loss, one.unit) == (30, 100, 70.0, 2.5, "batch")


def test_a_bar_an_epoch() -> None:
    first_bar = "Epoch 1/3:  30%|###       | 30/100 [00:30<01:10,  1.00s/it, loss=2.5]"
    text = first_bar + "\rEpoch 2/3:   1%|  | 1/100 [00:01<01:40]\r"
    first, second = readings(text)
    assert (first.epoch, first.epochs, first.step, first.steps, first.loss) == (0, 3, 30, 300, 2.5)
    assert (second.epoch, second.step, second.steps) == (1, 101, 300)


def test_bars_count_until_something_better_is_seen() -> None:
    loading, mapping = "Loading: 100%|##| 8/8 [00:01<00:00, 8.0it/s]", "Map: 5%|#| 1/20 [00:01<00:19, 1it/s]"
    text = f"{loading}\nEpoch 1/5 step 120/768 loss 5.29\n{mapping}\n"
    assert [(one.step, one.steps, one.stand_in) for one in readings(text)] == [(8, 8, True), (120, 768, False)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Epoch 1/5 step 120/768 loss 5.29 lr 3.0e-05 1490 tokens/s", (0, 5, 120, 768, 5.29, 3e-5, 1490)),
        ("[2026-01-01 10:00:00] epoch: 2 | step: 130 | loss: 4.1e0", (1, None, 130, None, 4.1, None, None)),
        ("epoch 0 iter 7 of 9 train_loss=3.5, learning_rate=0.1", (0, None, 7, 9, 3.5, 0.1, None)),
        ("Step 40, Loss = inf", (None, None, 40, None, math.inf, None, None)),
    ],
)
def test_lines_in_plain_words(text: str, told: tuple[object, ...]) -> None:
    [one] = readings(text + "\n")
    assert (one.epoch, one.epochs, one.step, one.steps, one.loss, one.lr, one.tokens_per_s) == told


@pytest.mark.parametrize(
    "text",
    [
        "the loss of a step is no news",
        "epoch 3 saved",
        "lossless step 3",
        "we lost 3 steps; loss unknown",
        "user: what is {'loss': 1.0}?",
        "100% of 3/4 [ready]",
        "config: loss=kl_div, epoch=first",
    ],
)
def test_talk_is_no_progress(text: str) -> None:
    assert readings(text + "\n") == []


def test_steps_that_begin_anew_with_each_epoch_are_added_up() -> None:
    text = "".join(f"epoch {epoch}/2 step {step}/100 loss 1\n" for epoch in (1, 2) for step in (40, 80))
    assert [(one.step, one.steps) for one in readings(text)] == [(40, 100), (80, 200), (140, 200), (180, 200)]
    whole = "".join(f"epoch {1 + step // 100}/2 step {step}/200 loss 1\n" for step in (40, 90, 140, 190))
    assert [(one.step, one.steps) for one in readings(whole)] == [(step, 200) for step in (40, 90, 140, 190)]


def test_a_regular_expression_of_the_users() -> None:
    pattern = r"E(?P<epoch>\d+)\.(?P<epochs>\d+) b(?P<epoch_step>\d+)\|(?P<epoch_steps>[\d,]+) L(?P<loss>\S+)"
    first, second = readings("E1.3 b10|1,000 L5.5\nother\nE2.3 b10|1,000 Lnan\n", {"regex": pattern})
    assert (first.epoch, first.epochs, first.step, first.steps, first.loss) == (0, 3, 10, 3000, 5.5)
    assert (second.epoch, second.step) == (1, 1010) and math.isnan(second.loss or 0)
    [zero] = readings("epoch 0", {"regex": r"epoch (?P<epoch0>\d+)"})
    assert zero.epoch == 0


def test_fault_16_a_pattern_that_backtracks_for_ever_is_given_up() -> None:
    warnings: list[str] = []
    adapter = choose_adapter({"regex": r"^(?P<loss>(a|aa)+)$"}, lambda code, message: warnings.append(code))
    assert [adapter.read("a" * 5000 + "!") for _ in range(50)] == [None] * 50
    assert warnings == ["regex_too_slow"]


def test_an_expression_that_cannot_be_compiled_is_bad_input():
    deep = "(" * 400 + r"(?P<loss>\d)" + ")" * 400
    ExternalParams(argv=("/bin/true",), progress={"regex": deep})
    with pytest.raises(BadInput, match="simplify it"):
        choose_adapter({"regex": deep}, lambda code, message: None)


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        ("hf", "is not a format"),
        ({"regex": "(loss"}, "not a regular expression"),
        ({"regex": r"loss (\d+)"}, "named groups are"),
        ({"regex": r"(?P<loss>\d)(?P<speed>\d)"}, "found besides: speed"),
        ({"regex": "(?P<loss>.)" + "x" * 1000}, "longer than"),
        ({"regex": r"(?P<loss>.)", "flags": "i"}, "is neither"),
        (7, "is neither"),
    ],
)
def test_progress_that_makes_no_sense(progress: object, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        ExternalParams.model_validate({"argv": ["/bin/sh"], "progress": progress})
    assert "progress" in str(refused.value).splitlines()[1]


@pytest.mark.parametrize("text", [SPECULATORS_09, SPECULATORS_03, SPECFORGE, HUGGING_FACE])
@pytest.mark.parametrize("number", ["nan", "-inf", "9" * 400, "1e400", "-1", "0", "1e308", "4e-320", "9" * 12])
def test_no_number_raises_or_becomes_a_count_that_cannot_be(text: str, number: str) -> None:
    for progress in ("auto", "speculators", "specforge", "hf_trainer", "tqdm", "plain"):
        for reading in readings(re.sub(r"\d[\d.e+-]*", number, text), progress):
            for count in (reading.step, reading.steps, reading.epoch, reading.epochs):
                assert count is None or 0 <= count < MAX_COUNT


@pytest.mark.parametrize(
    "unit",
    [
        "{'loss': 1, ",
        "'a': [1, ",
        "a=1",
        "epoch ",
        "9",
        "9.",
        "Epoch 1 1% ",
        "1%|#",
        "1%|#| 1/2 [",
        "a/",
        "loss ",
        "\u2501",
    ],
)
def test_fault_16_no_line_takes_long(unit: str) -> None:
    line = (unit * 8192)[:8192]
    began = time.process_time()
    readings(line + "\n" + line + "!\n")
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("text", [SPECULATORS_09, SPECULATORS_03, SPECFORGE, HUGGING_FACE])
def test_no_cut_of_a_log_raises(text: str) -> None:
    """Whatever part of it is there: cut anywhere, and with a byte changed anywhere."""
    data = text.encode()
    for place in range(0, len(data), 7):
        for piece in (data[:place], data[place:], data[:place] + b"\xff" + data[place + 1 :]):
            splitter = LineSplitter()
            adapter = choose_adapter("auto", lambda code, message: None)
            for line in [*splitter.feed(piece), *splitter.flush()]:
                adapter.read(line)
