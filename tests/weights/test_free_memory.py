"""The memory that is free."""

from fedkseed.weights import free_memory
from fedkseed.weights.free_memory import available


def test_memory_of_a_group_of_processes_is_bounded_by_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    without = available()
    assert without > 1 << 20
    for name, text in {"max": "3000\n", "current": "2500\n", "stat": "anon 1\ninactive_file 400\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert available() == 900
    (tmp_path / "memory.max").write_text("max\n")
    assert available() > 1 << 20
