"""A script that torchrun starts in several processes: the training of one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch
import fedkseed as fk
from transformers import TrainingArguments

torch.set_num_threads(1)
output, steps_of, local_steps, resume, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "resume", 0
torch.manual_seed(int(sys.argv[5]))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
rows = torch.Generator().manual_seed(1)
x = torch.randn(36, 4, generator=rows)
data = {f"site {k}": [(a, a.sum(0, True)) for a in x[12 * k : 12 * k + 12]] for k in range(3)}
args = TrainingArguments(
    output, max_steps=6, learning_rate=1e-2, lr_scheduler_type="constant", per_device_train_batch_size=4, use_cpu=True,
    report_to=[], save_steps=2, logging_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
)
loss = lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean()
trainer = fk.Trainer(
    model, data, data["site 0"], args, compute_loss=loss, steps_of=steps_of, local_steps=local_steps, cohort=2
)
trainer.train(resume_from_checkpoint=resume)
trainer.save_model(output + "/model")
timed = ("runtime", "second")
history = [{k: v for k, v in e.items() if not any(t in k for t in timed)} for e in trainer.state.log_history]
if trainer.is_world_process_zero():
    print("RESULT", json.dumps([trainer.adapter.tuned, history]))
"""


def run(folder: Path, processes: int, *arguments: object, fails: bool = False) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    words = [sys.executable, *start, folder / "script.py", folder / "out", *arguments]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr


def result(said: str) -> tuple[str, list[dict[str, float]]]:
    (line,) = (line for line in said.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize(("steps_of", "local_steps"), [("adam", 1), ("two points", 3)])
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_end_with_the_model_the_log_and_the_checkpoints_of_one(tmp_path, steps_of, local_steps, processes):
    asked = (steps_of, local_steps, "new", 7)
    alone, together = run(tmp_path / "alone", 0, *asked), run(tmp_path / "together", processes, *asked)
    assert result(alone) == result(together)
    ours, theirs = (sorted(path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*"))
                    for name in ("alone", "together"))  # fmt: skip
    assert ours == theirs
    for name in ("checkpoint-6/state.safetensors", "model/adapter.safetensors", "model/model.safetensors"):
        assert (tmp_path / "alone/out" / name).read_bytes() == (tmp_path / "together/out" / name).read_bytes()
    again = run(tmp_path / "together", processes, steps_of, local_steps, "resume", 7)
    assert result(again)[0] == result(alone)[0]


def test_more_processes_than_clients_and_another_model_in_one_of_them_are_refused(tmp_path):
    said = run(tmp_path / "many", 4, "adam", 1, "new", 7, fails=True)
    assert "torchrun has started 4 processes for 3 clients: each trains some of them" in said
    other = SCRIPT.replace("int(sys.argv[5])", 'int(__import__("os").environ["RANK"])')
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "script.py").write_text(other)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*start, str(tmp_path / "two" / "script.py"), str(tmp_path / "two" / "out"), "adam", "1", "new", "7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode
    assert "process 1 trains with base" in done.stderr
    assert "all processes of torchrun need the same model, rows and arguments" in done.stderr
