"""The generation engine against the same model's raw forward passes, with transformers' static cache.

    python benchmarks/generation_bench.py [--size tiny] [--batch 64] [--prompt 32] [--tokens 64] [--repeats 7]
    python benchmarks/generation_bench.py --model-dir Qwen2.5-0.5B --device cuda --dtype bfloat16 --batch 128

Raw: one pass over a batch of prompts, then one per token over a StaticCache of prompt + tokens columns, each ending in
the logits of the last position; no token is drawn, looked at or kept. The engine does all that, on the same prompts and
to the same length. Of the other rows, `ragged` has four times as many prompts as batch rows, and responses that end by
chance, after half as many tokens on average. Weights of a preset are random. Contestants take turns within one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import Comparison, Report, interleaved, median, print_table, timed
from transformers import StaticCache

from rlinf_lite.generation import Generation, SamplingParams
from rlinf_lite.generation.engine import TransformersEngine
from rlinf_lite.models.text.causal_lm import CausalLM
from rlinf_lite.models.text.presets import preset

TARGET = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", help="of a preset")
    parser.add_argument("--model-dir", help="in place of a preset")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = Report("generation", vars(args))
    torch.manual_seed(0)
    model = CausalLM.from_pretrained(args.model_dir) if args.model_dir else CausalLM.from_config(preset(args.size))
    model = model.to(args.device, getattr(torch, args.dtype)).eval()
    engine = TransformersEngine(model, args.batch, args.prompt + args.tokens)
    vocab_size = model.language_model.config.vocab_size
    prompts = torch.randint(vocab_size, (4 * args.batch, args.prompt))
    first = prompts[: args.batch]
    stops = tuple(range(max(2 * vocab_size // args.tokens, 1)))

    def raw() -> float:
        seconds = timed(lambda: raw_passes(model, first.to(args.device), args.tokens))
        return args.batch * args.tokens / seconds

    def generate(of: torch.Tensor, params: SamplingParams) -> Callable[[], float]:
        def measure() -> float:
            done: list[Generation] = []
            seconds = timed(lambda: done.extend(engine.stream(of.tolist(), params)))
            return sum(len(response.token_ids) for response in done) / seconds

        return measure

    contestants = {
        "raw": raw,
        "engine": generate(first, SamplingParams(args.tokens)),
        "top_k 20": generate(first, SamplingParams(args.tokens, top_k=20)),
        "top_p 0.95": generate(first, SamplingParams(args.tokens, top_p=0.95)),
        "ragged": generate(prompts, SamplingParams(args.tokens, stop_token_ids=stops)),
    }
    found = interleaved(contestants, args.repeats, unit="tokens/s")

    report.measurements |= {f"{name}, tokens/s": figures for name, figures in found.items()}
    rows = [[name, f"{median(v):,.0f}", f"{median(v) / median(found['raw']):.2f}"] for name, v in found.items()]
    print_table("generated tokens/s", ["what", "median", "of raw"], rows)
    what = f"generation, {args.model_dir or args.size}, batch {args.batch}, {args.prompt} + {args.tokens} tokens"
    ours, opponent = median(found["engine"]), median(found["raw"])
    report.comparisons.append(
        Comparison(what, ours, "raw passes, StaticCache", opponent, "tokens/s", ours / opponent, TARGET, at_least=True)
    )
    report.write()


@torch.no_grad()
def raw_passes(model: CausalLM, prompts: torch.Tensor, num_tokens: int) -> None:
    """As many passes as `num_tokens` tokens take; the prompts' gives the first."""
    cache = StaticCache(model.language_model.config, max_cache_len=prompts.shape[1] + num_tokens)
    ids = prompts
    for _ in range(num_tokens):
        model.language_model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = prompts[:, :1]
    if prompts.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
