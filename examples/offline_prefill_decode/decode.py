"""Answer the prompts whose KV prefill.py has left in a directory. It is loaded; only what is behind it is computed."""

import argparse
import json
from pathlib import Path

from pdkv import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where prefill.py leaves what decode.py reads")
    directory = parser.parse_args().directory
    prompts = json.loads((directory / "prompts.json").read_text())
    with LLM(connector="shared_storage", connector_config={"path": str(directory / "kv")}) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    for output in outputs:
        print(f"{output.outputs[0].text}  ({output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens loaded)")


if __name__ == "__main__":
    main()
