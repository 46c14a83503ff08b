"""Compute the KV of some prompts and leave it in a directory; decode.py, in another process, continues from there.

python examples/offline_prefill_decode/prefill.py /tmp/pdkv-offline
python examples/offline_prefill_decode/decode.py /tmp/pdkv-offline
"""

import argparse
import json
from pathlib import Path

from pdkv import LLM, SamplingParams

TEXT = (
    "bone=6386 horn=7090 sand=9952 rain=0034 pen=7297 bean=4363 coal=3748 boat=9685 frog=1674 fern=5200 "
    "fish=0501 lock=0365 dot=0416 plum=8870 cap=0150 bell=6245 fox=3548 axe=6915 toad=0475 rock=8644"
)
CODES = TEXT.split()
PROMPTS = [
    f"Codes: {', '.join(CODES)}. lock=",
    f"Codes: {', '.join(reversed(CODES))}. fox=",
    f"Codes: {', '.join(sorted(CODES))}. sand=",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where prefill.py leaves what decode.py reads")
    directory = parser.parse_args().directory
    with LLM(connector="shared_storage", connector_config={"path": str(directory / "kv")}) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    (directory / "prompts.json").write_text(json.dumps([output.prompt for output in outputs]))
    print(f"prefilled {len(outputs)} prompts of {[len(output.prompt_token_ids) for output in outputs]} tokens")


if __name__ == "__main__":
    main()
