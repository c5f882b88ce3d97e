"""Machine: presets against what must hold for every GPU, and the unit slips that are refused."""

from dataclasses import replace

import pytest

from counterpoint.errors import InputError
from counterpoint.machine import LinkSpec, Machine
from counterpoint.presets import A40, H200, MI300X, preset

NAMES = ("a100-8", "a40-4", "h100-8", "h200-8", "b200-8", "gb200-72", "mi250x-8", "mi300x-8")


@pytest.mark.parametrize("name", NAMES)
def test_preset_is_consistent(name):
    machine = preset(name)
    device = machine.device
    assert machine.name == name
    assert machine.num_devices == int(name.rpartition("-")[2])
    assert not machine.measured
    assert device.warp_size == (64 if name.startswith("mi") else 32)
    assert device.warp_size * device.max_warps_per_sm == device.max_threads_per_sm
    assert device.shared_bytes_per_block <= device.shared_bytes_per_sm
    assert device.fp32_flop_per_s < device.bf16_flop_per_s
    # the order of every machine in use: memory is faster than links
    assert machine.link.bytes_per_s < device.hbm_bytes_per_s
    for source in (machine.source, device.source, machine.link.source):
        assert source


@pytest.mark.parametrize("count", range(1, 9))
def test_any_count_of_any_preset(count):
    for name in NAMES:
        base = name.partition("-")[0]
        machine = preset(f"{base}-{count}")
        assert (machine.name, machine.num_devices) == (f"{base}-{count}", count)
        assert machine.device == preset(name).device


def test_fewer_gpus_of_a_mesh_have_fewer_links():
    link = preset("mi300x-4").link
    assert link.bytes_per_s == pytest.approx(3 * 64e9)
    assert link.pair_bytes_per_s(4) == pytest.approx(MI300X.link.pair_bytes_per_s(8))
    assert preset("h200-4").link == H200.link


def test_pair_rate_by_topology():
    assert H200.link.pair_bytes_per_s(8) == H200.link.bytes_per_s
    assert A40.link.pair_bytes_per_s(4) == A40.link.bytes_per_s
    assert MI300X.link.pair_bytes_per_s(8) == pytest.approx(64e9)
    with pytest.raises(InputError, match="num_devices must be at least 2, got 1"):
        MI300X.link.pair_bytes_per_s(1)


@pytest.mark.parametrize("name", ["v100-8", "h200", "h200-0", "h200-9", "h200-08", "H200-8", ""])
def test_unknown_preset_lists_those_that_exist(name):
    with pytest.raises(InputError, match=f"one of {', '.join(NAMES)}, .*, got '{name}'"):
        preset(name)


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trip(name):
    machine = preset(name)
    machine = replace(machine, measured=machine.costs, gemm_tile=(256, 128))
    assert Machine.from_json(machine.to_json()) == machine
    assert hash(Machine.from_json(machine.to_json())) == hash(machine)


def test_link_is_keyword_only():
    with pytest.raises(TypeError):
        LinkSpec("x", 450e9, 2e-6, "switch", 5e-6, "y")  # type: ignore[misc]
