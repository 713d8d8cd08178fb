"""`offspec run` where everything goes well: prompts in, text, JSON and figures out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from click import Context

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.cli.flag_declarations import REPLACED
from offspec.cli.main import COMMANDS, LazyGroup, cli
from offspec.loaded_target import LoadedTarget
from offspec.notes import Note
from offspec.planning import plan
from offspec.running.batch import Batch
from offspec.scheduler.pace.speculation_switch import SpeculationSwitch
from offspec.text.tokenizer import Tokenizer

from ..pair import Pair, variant
from ..refusals import tells
from .conftest import Offspec

KEYS = {"model", "draft", "prompt_token_ids", "token_ids", "text", "finish_reason", "seed", "stats"}
STATS_KEYS = {
    *("ttft_s", "prefill_s", "decode_s", "draft_s", "target_s", "decode_tokens_per_s"),
    *("num_tokens", "num_passes", "tokens_per_pass"),
    *("stream_bytes_per_pass", "stream_gb_per_s", "link_gb_per_s", "peak_host_bytes", "peak_device_bytes"),
}


def run_json(offspec: Offspec, *args: object, stdin: bytes | None = None) -> dict[str, Any]:
    result = offspec(*args, "--json", stdin=stdin)
    assert (result.code, result.err) == (0, "")
    answer: dict[str, Any] = json.loads(result.out)
    return answer


def prompt_text(pair: Pair, answer: dict[str, Any]) -> str:
    return Tokenizer.load(pair.target).decode(answer["prompt_token_ids"], skip_special_tokens=False)


def test_json_is_one_object_with_the_promised_keys(run_args: Sequence[object], pair: Pair, offspec: Offspec) -> None:
    answer = run_json(offspec, *run_args, "hi", "--seed", "7")
    assert answer.keys() == KEYS
    assert answer["stats"].keys() >= STATS_KEYS
    assert (answer["model"], answer["draft"], answer["seed"]) == (str(pair.target), str(pair.draft), 7)
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == answer["stats"]["num_tokens"] == 6


def test_a_prompt_longer_than_the_default_context_gets_a_longer_one(
    run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the user had asked for it."""
    whole = run_json(offspec, *run_args, "x" * 60)
    monkeypatch.setattr(plan, "DEFAULT_CONTEXT", 32)
    monkeypatch.setattr(plan, "_grown", lambda plan: plan)
    answer = run_json(offspec, *run_args, "x" * 60)
    assert (len(answer["prompt_token_ids"]) > 60, answer["token_ids"]) == (True, whole["token_ids"])


@pytest.mark.parametrize(("flags", "is_shown"), [((), True), (("--quiet",), False)])
def test_what_is_noticed_while_a_text_is_made_is_told_after_it(
    run_args: Sequence[object],
    offspec: Offspec,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    is_shown: bool,
) -> None:
    def observe(self: LoadedTarget, *args: object) -> None:
        if not any("noticed" in note.text for note in self.notes):
            self.notes += [Note("noticed; set a lower `vram`", advice=True), Note("noticed, too")]

    monkeypatch.setattr(LoadedTarget, "observe_pass", observe)
    result = offspec(*run_args, "hi", *flags)
    assert (result.code, result.err) == (0, "offspec: noticed; set a lower --vram\n" if is_shown else "")


def test_a_drawn_seed_is_told_and_gives_the_text_again(run_args: Sequence[object], offspec: Offspec) -> None:
    drawn = run_json(offspec, *run_args, "hi", "--temperature", "1")
    again = run_json(offspec, *run_args, "hi", "--temperature", "1", "--seed", drawn["seed"], "--budget", "0")
    other = run_json(offspec, *run_args, "hi", "--temperature", "1", "--seed", drawn["seed"] + 1)
    assert again["token_ids"] == drawn["token_ids"] != other["token_ids"]


def test_a_prompt_is_a_chat_message_unless_raw(run_args: Sequence[object], pair: Pair, offspec: Offspec) -> None:
    def asked(*args: str) -> str:
        return prompt_text(pair, run_json(offspec, *run_args, *args))

    assert asked("hi") == "<|user|>hi<|end|><|assistant|>"
    assert asked("hi", "--system", "Be brief.") == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
    assert asked("hi", "--raw") == "hi"


def test_a_model_without_a_template_continues_the_prompt(pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    folder = variant(pair.target, tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    answer = run_json(offspec, "run", folder, "hi", "--draft", "none", "--max-new-tokens", 2)
    assert prompt_text(pair, answer) == "hi"


def test_a_prompt_from_standard_input(run_args: Sequence[object], pair: Pair, offspec: Offspec) -> None:
    answer = run_json(offspec, *run_args, "-", "--raw", stdin="schön\n".encode())
    assert prompt_text(pair, answer) == "schön\n"


@pytest.mark.parametrize(("piped", "words", "prompt"), [(b"a\nb\n\n", "why?", "a\nb\n\nwhy?"), (b"a\n", "", "a")])
def test_a_pipe_goes_before_the_prompt(
    piped: bytes, words: str, prompt: str, run_args: Sequence[object], pair: Pair, offspec: Offspec
) -> None:
    answer = run_json(offspec, *run_args, words, "--raw", stdin=piped)
    assert prompt_text(pair, answer) == prompt


def test_flags_have_the_names_that_llama_cpp_gives_them(
    run_args: Sequence[object], pair: Pair, offspec: Offspec
) -> None:
    short = run_json(offspec, *run_args[:-2], "hi", "-n", 5, "-c", 64, "--temp", 0.8, "--seed", 1)
    flags = ("--max-new-tokens", 5, "--context", 64, "--temperature", 0.8, "--seed", 1)
    assert short["token_ids"] == run_json(offspec, *run_args[:-2], "hi", *flags)["token_ids"]
    assert len(short["token_ids"]) == 5


def test_a_prompt_from_a_file(run_args: Sequence[object], pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    (tmp_path / "prompt.txt").write_bytes("schön\r\n".encode())
    answer = run_json(offspec, *run_args, "--prompt-file", tmp_path / "prompt.txt", "--raw", stdin=b"not this")
    assert prompt_text(pair, answer) == "schön\r\n"


def test_a_prompt_as_ids(run_args: Sequence[object], tmp_path: Path, offspec: Offspec) -> None:
    (tmp_path / "ids.jsonl").write_text('{"prompt": [40, 41, 319]}')
    result = offspec(*run_args, "--prompt-file", tmp_path / "ids.jsonl", "--system", "Be brief.")
    assert (result.code, result.err) == (0, "")
    answer = json.loads(result.out)
    assert (answer["prompt_token_ids"], len(answer["token_ids"])) == ([40, 41, 319], 6)


def test_every_flag_reaches_the_engine(
    run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    generate = Engine.generate

    def spy(self: Engine, prompt: Any, params: SamplingParams, speculation: SpeculationParams) -> Any:
        asked.append((params, speculation))
        return generate(self, prompt, replace(params, max_new_tokens=2), speculation)

    monkeypatch.setattr(Engine, "generate", spy)
    flags = (
        *("--max-new-tokens", 3, "--temperature", 0.5, "--top-k", 9, "--top-p", 0.8, "--min-p", 0.1),
        *("--repetition-penalty", 1.2, "--seed", 5, "--stop", "zz", "--stop", "yy"),
        *("--budget", 4, "--stopping", "thompson"),
    )
    assert offspec(*run_args[:-2], "hi", *flags).code == 0
    assert offspec(*run_args[:-2], "hi").code == 0
    params = SamplingParams(3, 0.5, 9, 0.8, 0.1, 1.2, 5, ("zz", "yy"))
    assert asked == [(params, SpeculationParams(4, stopping="thompson")), (SamplingParams(), SpeculationParams())]


def test_stats_stand_on_stderr(run_args: Sequence[object], offspec: Offspec) -> None:
    plain = offspec(*run_args, "hi")
    result = offspec(*run_args, "hi", "--seed", 5, "--stats")
    assert (result.code, result.out) == (0, plain.out)
    for word in ("6 tokens", "tokens/s", "draft", "target", "GiB", "seed 5"):
        assert word in result.err
    assert result.err.isascii()


@pytest.mark.slow
def test_a_text_that_is_cut_says_so(
    run_args: Sequence[object], pair: Pair, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = offspec(*run_args, "hi", "--max-new-tokens", 500, "--context", 24).err
    assert tells(full, "context", 24)
    monkeypatch.setenv("OFFSPEC_MAX_NEW_TOKENS", "8")
    args = (*run_args[:-2], "hi")
    (line,) = offspec(*args).err.splitlines()
    assert tells(line, 8, "--max-new-tokens")
    assert offspec(*args, "-q").err == ""
    assert "8 tokens (length)" in offspec(*args, "--stats").err


def test_a_draft_that_is_switched_off_is_told(
    run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeculationSwitch, "speculates", lambda self, is_first: False)
    monkeypatch.setattr(SpeculationSwitch, "is_resting", True)
    result = offspec(*run_args, "hi", "-n", 12, "--json", "--stats")
    assert "off since pass 1 of" in result.err
    assert "--budget 16 forces it" in result.err
    stats = json.loads(result.out)["stats"]
    assert stats["draft_off_since"] == 1
    assert stats["plain_pass_s"] > 0
    assert "off since" not in offspec(*run_args, "hi", "--budget", 16, "--stats").err


@pytest.mark.parametrize("flags", [("--stats",), ("--json",)], ids=" ".join)
def test_what_is_there_at_ctrl_c_is_told(
    flags: Sequence[str], run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, generate = run_json(offspec, *run_args, "hi", "--budget", 0), Engine.generate

    def interrupted(self: Engine, *args: Any, **more: Any) -> Any:
        yield from islice(generate(self, *args, **more), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupted)
    result = offspec(*run_args, "hi", "--budget", 0, *flags)
    assert result.code == 130
    if flags == ("--json",):
        answer = json.loads(result.out)
        assert (answer.keys(), answer["finish_reason"]) == (KEYS, "interrupted")
        assert answer["token_ids"] == whole["token_ids"][:3]
        assert answer["stats"]["num_tokens"] == 3
        assert (len(answer["text"]) > 0, whole["text"].startswith(answer["text"])) == (True, True)
    else:
        assert whole["text"].startswith(result.out.strip("\n"))
        assert "3 tokens (interrupted)" in result.err


def test_where_guesses_were_looked_up(run_args: Sequence[object], offspec: Offspec, tmp_path: Path) -> None:
    """A file that has the answer in it is named, with the place; other files are not."""
    plain = run_json(offspec, *run_args, "hi", "--raw", "--budget", 0)
    assert "looked_up" not in plain
    notes, other = tmp_path / "notes.txt", tmp_path / "other.txt"
    notes.write_text(f"Something else first.\nhi{plain['text']}", encoding="utf-8")
    other.write_text("Nothing of the kind.\n", encoding="utf-8")
    files = ("--lookup-files", other, "--lookup-files", notes)
    told = run_json(offspec, *run_args, "hi", "--raw", *files, "--budget", 16)
    assert told["token_ids"] == plain["token_ids"]
    assert told["looked_up"]
    content = notes.read_bytes()
    for found in told["looked_up"]:
        assert found["file"] == str(notes)
        assert 0 <= found["first_token"] < found["first_token"] + found["num_tokens"] <= len(told["token_ids"])
        assert 0 < found["offset"] < len(content)


JOINT = ("--accept", "joint", "--tau", "0.01")


def test_joint_acceptance_is_marked_lossy(run_args: Sequence[object], offspec: Offspec) -> None:
    shown = [offspec(*run_args, "hi", "--json", "--stats", *flags) for flags in ((), JOINT)]
    exact, joint = (json.loads(each.out) for each in shown)
    assert (exact["stats"]["is_lossy"], joint["stats"]["is_lossy"]) == (False, True)
    assert len(joint["token_ids"]) == 6
    assert joint["token_ids"] != exact["token_ids"]
    assert ["lossy" in each.err for each in shown] == [False, True]
    assert "\nlossy " in shown[1].err


def test_notes_are_advice_unless_quiet_or_verbose(pair: Pair, offspec: Offspec) -> None:
    args = ("run", pair.target, "hi", "--max-new-tokens", 2, "--device", "cpu")
    advised = (*args, "--vram", "1GiB")
    assert offspec(*advised).err.count("--vram is ignored on the CPU") == 1
    assert offspec(*advised, "--quiet").err == offspec(*args, "--draft", "none").err == ""
    loud = offspec(*args, "-v")
    assert loud.code == 0
    assert "dtype fp32" in loud.err
    assert "draft: n-gram lookup" in loud.err
    assert offspec(*args).err == "", "nothing is predicted for a resident target, so nothing is advised"


def test_stats_tell_whether_the_cached_prompt_was_used(
    run_args: Sequence[object], offspec: Offspec, tmp_path: Path
) -> None:
    args = (*run_args, "hi " * 40, "--raw", "--cache-prompt", tmp_path / "prompt.kv", "--stats", "-n", 2)
    assert "from --cache-prompt" not in offspec(*args).err
    assert re.search(r"prompt +\d+ tokens, \d+ of them from --cache-prompt", offspec(*args).err)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", ("[default: random; --stats and --json show it]", "torch's choice")),
        ("bench", ("does not change the text. [default: 0]", "(offspec chat --learn).")),
        ("plan", ("PATH|auto|mtp|shadow|head|self|lookup|none",)),
    ],
)
def test_help_holds_for_its_command(command: str, words: Sequence[str], offspec: Offspec) -> None:
    shown = " ".join(offspec(command, "--help-all").out.split())
    for text in words:
        assert text in shown


EVERYDAY = ("--draft ", "--vram ", "--context ", "--budget ", "--temperature, ", "--json ", "--device ", "--seed ")
RESEARCH = ("--stopping ", "--accept ", "--tau ")
SELDOM = ("--dtype ", "--threads ", "--min-p ", "--lookup-files ")
MOST_FLAGS = 38  # of `run`, with --help and --help-all


def flags_of(shown: str) -> dict[str, list[str]]:
    """The flags under each heading, by their first name."""
    found, heading = dict[str, list[str]](), ""
    for line in shown.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line
        elif line.startswith("  -"):
            found.setdefault(heading, []).append(line.split()[0])
    return found


def test_the_rest_is_left_out_until_all_is_asked_for(offspec: Offspec) -> None:
    shown, everything = offspec("run", "--help"), offspec("run", "--help-all")
    assert (shown.code, shown.err, everything.code, everything.err) == (0, "", 0, "")
    assert all(flag in shown.out and flag in everything.out for flag in EVERYDAY)
    assert not any(f"\n  {flag}" in shown.out for flag in (*RESEARCH, *SELDOM))
    assert all(f"\n  {flag}" in everything.out for flag in (*RESEARCH, *SELDOM))
    last = shown.out.splitlines()[-1].split()
    num_left_out = sum(map(len, flags_of(everything.out).values())) - sum(map(len, flags_of(shown.out).values()))
    assert last == ["--help-all", "Show", str(num_left_out), "more", "flags."]
    assert sum(map(len, flags_of(everything.out).values())) <= MOST_FLAGS
    assert "<=" not in everything.out.partition("Options:")[2]  # ranges are said where they are left


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--no-recall",), ("--no-recall", "offspec bench")),
        (("--prompts", "x"), ("--prompts", "offspec bench and verify")),
        (("--exit-layer", "2"), ("--exit-layer", "--draft self:N")),
        (("--ngl", "99"), ("--ngl", "--vram SIZE")),
        (("-m", "model.gguf"), ("-m", "MODEL as the first argument")),
        (("--ctx-size=8192",), ("--ctx-size", "--context N")),
        (("-p", "hi"), ("-p", "PROMPT as the second argument")),
        (("--ray", "auto"), ("--ray", "--batch ray")),
    ],
)
def test_a_flag_that_is_elsewhere_is_told(flags: Sequence[str], words: Sequence[str], offspec: Offspec) -> None:
    offspec("run", "builtin", "hi", *flags).refusal(2, *words)


def test_what_is_given_in_place_of_other_programs_flags_exists() -> None:
    assert isinstance(cli, LazyGroup)
    commands = [cli.get_command(Context(cli), name) for name in COMMANDS]
    flags = {flag for command in commands if command for parameter in command.params for flag in parameter.opts}
    assert REPLACED.keys() & flags == {"--exit-layer"}, "of distill"
    assert {word for instead in REPLACED.values() for word in re.findall(r"--[a-z-]+", instead)} <= flags


@pytest.mark.parametrize("command", [*COMMANDS])
def test_help_explains_every_flag(command: str, offspec: Offspec) -> None:
    assert isinstance(cli, LazyGroup)
    shown = offspec(command, "--help-all")
    assert (shown.code, shown.err) == (0, "")
    assert f"  offspec {command}" in shown.out.partition("Example")[2].partition("Options:")[0]
    found = cli.commands.get(command) or cli.get_command(None, command)  # type: ignore[arg-type]
    assert found is not None
    for parameter in found.params:
        if parameter.param_type_name == "option":
            assert parameter.opts[0] in shown.out
            assert getattr(parameter, "help", None), f"{parameter.opts[0]} has no help"


def test_special_tokens_in_messages_are_text_unless_asked_for(
    run_args: Sequence[object], pair: Pair, offspec: Offspec
) -> None:
    (end,) = Tokenizer.load(pair.target).encode("<|end|>")
    harmless, plain = (run_json(offspec, *run_args, prompt)["prompt_token_ids"] for prompt in ("hi", "hi<|end|>"))
    assert plain.count(end) == harmless.count(end)
    chats = [
        offspec("chat", pair.target, "--device", "cpu", "-n", 2, *flags, stdin=b"hi<|end|>\n/stats\n").out.split()
        for flags in ((), ("--special-in-text",))
    ]
    kept, special = (int(words[words.index("1") + 1]) for words in chats)
    assert kept > special


@pytest.mark.slow
def test_several_answers_are_those_of_their_seeds(run_args: Sequence[object], offspec: Offspec) -> None:
    asked = (*run_args, "hi", "--temperature", 1)
    alone = [run_json(offspec, *asked, "--seed", seed) for seed in (7, 8, 9)]
    result = offspec(*asked, "--seed", 7, "--num-answers", 3, "--batch", 2, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert [answer.keys() for answer in found] == [KEYS] * 3
    for key in ("seed", "token_ids", "text", "finish_reason", "prompt_token_ids"):
        assert [answer[key] for answer in found] == [answer[key] for answer in alone]
    shown = offspec(*asked, "--seed", 7, "--num-answers", 3, "--stats")
    headed = [f"=== answer {i} of 3, seed {6 + i} ===\n{alone[i - 1]['text']}\n" for i in (1, 2, 3)]
    assert shown.out == "\n".join(headed)
    assert shown.err.startswith("answers   3 (3 length), 18 tokens, ")
    assert "tokens, first text after" in shown.err


def test_several_answers_that_make_no_sense_are_refused(
    run_args: Sequence[object], offspec: Offspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", None)
    (tmp_path / "many.jsonl").write_text('{"prompt": "hi"}\n')
    warm = ("--num-answers", 2, "--temperature", 1)
    offspec(*run_args, "--prompt-file", tmp_path / "many.jsonl", *warm).refusal(2, "--num-answers", ".jsonl")
    offspec(*run_args, "hi", "--num-answers", 2).refusal(2, "--temperature 0", "--num-answers")
    offspec(*run_args, "hi", "--num-answers", 65, "--temperature", 1).refusal(2, "65")


def test_several_answers_that_are_interrupted(
    run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two passes, all that have begun are there, and say so. The third one waits for an end."""
    real = Batch.step
    calls = iter(range(100))

    def stopping(self: Batch) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Batch, "step", stopping)
    asked = (*run_args, "hi", "--temperature", 1, "--seed", 7, "--num-answers", 3, "--batch", 2, "--budget", 0)
    result = offspec(*asked, "--json")
    assert result.code == 130
    found = json.loads(result.out)
    assert [(answer["seed"], len(answer["token_ids"])) for answer in found] == [(7, 2), (8, 2)]
    assert {answer["finish_reason"] for answer in found} == {"interrupted"}
    calls = iter(range(100))
    shown = offspec(*asked, "-q").out
    assert shown.count("===\n") == 2
    assert shown.endswith(found[1]["text"] + "\n")
