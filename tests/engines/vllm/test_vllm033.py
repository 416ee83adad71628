"""vLLM 0.33.0 runs here, and is what it says it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.engines.model import tiny_llama
from tests.engines.vllm033 import VERSION, environment, tree

SCRIPT = """
import json, sys
import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

llm = LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
          block_size=32, max_model_len=1024)
prompt = TokensPrompt(prompt_token_ids=list(range(3, 203)))
greedy = SamplingParams(max_tokens=4, temperature=0, detokenize=False)
outputs = [llm.generate([prompt], greedy)[0] for _ in range(2)]
print(json.dumps({
    "version": vllm.__version__,
    "file": vllm.__file__,
    "new in it": hasattr(KVConnectorBase_V1, "restore_kv_caches"),
    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    "cached": [output.num_cached_tokens for output in outputs],
}))
"""


def test_the_engine_of_0_33_runs(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == VERSION
    assert Path(found["file"]).is_relative_to(tree())
    assert found["new in it"]
    assert found["cached"] == [0, 192]
    assert found["tokens"][0] == found["tokens"][1]
    assert len(found["tokens"][0]) == 4
