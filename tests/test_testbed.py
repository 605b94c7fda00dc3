"""Hosts with shaped links: real traffic between namespaces, nothing left behind, one line where a host fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from autopar import AutoparError
from autopar.bench.hosts import Hosts, missing
from autopar.bench.regret import WORKLOADS, rivals
from autopar.bench.runtime import CELLS
from autopar.pins import Pins
from autopar.profiling.collectives import rows

SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1,), float(dist.get_rank()))
dist.all_reduce(x)
if dist.get_rank() == 0:
    print(int(x))
dist.destroy_process_group()
"""
BROKEN = 'import os\nif os.environ["GROUP_RANK"] == "1":\n    raise ValueError("no such plan")\n'


@pytest.mark.skipif(bool(missing()), reason=f"the testbed {missing()}")
def test_hosts_talk_over_a_shaped_link_and_leave_nothing(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(SUM)
    bad.write_text(BROKEN)
    with Hosts(2, 1, "200mbit") as hosts:
        shape = subprocess.run(
            ["ip", "netns", "exec", hosts.names[1], "tc", "qdisc", "show", "dev", "net0"],
            capture_output=True,
            text=True,
        ).stdout
        assert "rate 200Mbit" in shape
        assert hosts.run([str(good)], timeout=120).strip() == "1"
        with pytest.raises(AutoparError, match="host 1 failed: .*no such plan"):
            hosts.run([str(bad)], timeout=120)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not [name for name in hosts.names if name in left]


@pytest.mark.parametrize(
    ("hosts", "rate", "line"), [(2, "fast", "--rate fast is no rate"), (0, "none", "0 hosts of 1 ranks")]
)
def test_bad_testbeds_are_one_line(hosts: int, rate: str, line: str) -> None:
    with pytest.raises(AutoparError, match=line):
        Hosts(hosts, 1, rate)


@pytest.mark.parametrize("ranks", [2, 4])
def test_there_are_rivals_enough_and_all_can_be_read(ranks: int) -> None:
    parsed = [Pins.parse(words.split()) for words in rivals(ranks)]
    assert len({json.dumps(p.given(), sort_keys=True) for p in parsed}) >= 12
    assert len(WORKLOADS) >= 6


def test_a_profile_meets_every_rank_once_in_each_round() -> None:
    for world, local in ((2, 1), (4, 2), (8, 2), (8, 8)):
        for sizes in rows(world, local).values():
            for size, every in sizes.items():
                assert sorted(rank for ranks in every for rank in ranks) == list(range(world))
                assert {len(ranks) for ranks in every} == {size}


def test_every_peer_trains_every_model() -> None:
    models, peers = ({name.split(" ", 1)[i] for name in CELLS} for i in (0, 1))
    names = {"ddp", "fsdp2", "tp", "1f1b", "tp+fsdp2", "eager", "torch.compile"}
    assert len(CELLS) == len(models) * len(peers) and names == peers
