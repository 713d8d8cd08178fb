"""llama.cpp through xllamacpp: the GGUF mapped (mmap), alone, with its draft model, or with n-grams.

Settings: `context`, tokens of all `texts` (requests at once) together. `draft_max` N drafts up to N tokens per pass,
`draft_p_min` ends a draft at a token less likely than that. `ngram` is a kind of n-gram speculation (ngram_cache,
ngram_simple, ...); other settings are that kind's.
"""

from __future__ import annotations

import json
import urllib.request

import common
import xllamacpp as llama


def load(job: common.Job) -> tuple[common.Generate, str]:
    params = llama.CommonParams()
    params.model.path = job.model
    params.n_ctx = job.settings.get("context", common.CONTEXT)
    params.n_parallel, params.kv_unified = job.settings.get("texts", 1), True
    # Without it, llama.cpp copies matrices to memory in another order, which is faster if it has room for them.
    params.no_extra_bufts = job.settings.get("only_mapped", False)
    params.warmup = False  # it would read the whole model once before the clock runs
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.threads
    if number := job.settings.get("draft_max"):
        speculative = params.speculative
        speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = speculative.draft  # to be changed in place
        draft.mparams.path = job.draft
        draft.n_max, draft.p_min = number, job.settings["draft_p_min"]
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = job.threads
    if kind := job.settings.get("ngram"):
        name = f"COMMON_SPECULATIVE_TYPE_{kind.upper()}"
        params.speculative.types = [getattr(llama.common_speculative_type, name)]
        own = getattr(params.speculative, kind)
        for setting in job.settings.keys() - {"ngram"}:
            setattr(own, setting, job.settings[setting])
    server = llama.Server(params)

    def generate(prompt: list[int], num_tokens: int, emit: common.Emit) -> int:
        asked = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        # The wrapper's own handle_completions gives text only; the server it starts also gives token ids.
        request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(asked).encode())
        accepted = 0
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                part = json.loads(line[6:]) if line.startswith(b"data: ") else {}
                if tokens := part.get("tokens"):
                    emit(tokens)
                if timings := part.get("timings"):
                    accepted = timings.get("draft_n_accepted", 0)
        return num_tokens - accepted

    return generate, f"xllamacpp {llama.__version__}"


if __name__ == "__main__":
    common.run(load)
