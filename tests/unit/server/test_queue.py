"""The one function that decides the queue: nothing twice, nobody starves, every wait has its reason."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from server.domain.job import Attempt, Job
from server.domain.queue import Host, Start, Wait, decide
from server.domain.resources import (
    GIB,
    CannotBeMet,
    Gpu,
    GpuRef,
    Resources,
    check_device,
    check_host,
    environment_of,
    resolve,
)
from server.domain.states import AttemptState, JobState

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def gpu(number, total=80, free=None, blocked=None):
    left = total if free is None else free
    return Gpu(str(number), f"GPU-{number}", "H100", total * GIB, round(left * GIB), blocked)


EIGHT = tuple(gpu(number) for number in range(8))


def host(gpus=EIGHT, leases=None, **changes):
    return Host(1, cpus=16, ram_bytes=64 * GIB, gpus=tuple(gpus), leases=leases or {}, **changes)


def job(number, stage="validate", params=None, priority=0, **asked):
    return Job(
        number=number,
        id=f"j{number}",
        name=f"name{number}",
        stage=stage,
        params=params or {},
        output_dir="/o",
        created_at=NOW,
        priority=priority,
        resources=Resources(**asked),
    )


def running(number, *uuids, **asked):
    refs = tuple(GpuRef(index=uuid.removeprefix("GPU-"), uuid=uuid, name=None) for uuid in uuids)
    attempt = Attempt(1, AttemptState.RUNNING, gpus=refs)
    return replace(job(number, gpus=len(uuids), **asked), state=JobState.RUNNING, attempt=attempt)


def given_to(decisions):
    return {d.job.number: [ref.index for ref in d.gpus] for d in decisions if isinstance(d, Start)}


def reasons(decisions):
    return {d.job.number: d.waiting for d in decisions if isinstance(d, Wait)}


def test_gpus_go_to_the_most_urgent_then_to_the_oldest():
    jobs = [job(1, gpus=4), job(2, gpus=4), job(3, gpus=2, priority=5)]
    decided = decide(jobs, host())
    assert given_to(decided) == {3: ["0", "1"], 1: ["2", "3", "4", "5"]}
    assert [d.job.number for d in decided] == [3, 1, 2]
    assert reasons(decided)[2] == (
        "waiting for 4 GPUs; GPUs 0, 1 are used by job name3 (j3); GPUs 2, 3, 4, 5 are used by job name1 (j1); "
        "GPUs 6, 7 are free"
    )


def test_the_reason_names_the_stranger_on_the_gpu():
    stranger = gpu(0, free=41.8, blocked="used by pid 4711 of another user, eve (38.2 GiB)")
    [waits] = decide([job(1, gpu_memory_gib=40)], host([stranger, gpu(1, total=24)]))
    assert waits.waiting == (
        "waiting for 1 GPU with 40 GiB free; GPU 0 is used by pid 4711 of another user, eve (38.2 GiB); "
        "GPU 1 is too small (24.0 GiB)"
    )


def test_less_free_memory_than_asked_is_waited_for():
    [waits] = decide([job(1, gpu_memory_gib=40)], host([gpu(0, free=39.5)]))
    assert waits.waiting == "waiting for 1 GPU with 40 GiB free; GPU 0 is left with 39.5 GiB free"


def test_the_smallest_gpu_that_does_is_taken():
    assert given_to(decide([job(1, gpu_memory_gib=20)], host([gpu(0), gpu(1, total=24)]))) == {1: ["1"]}


def test_a_job_that_waits_for_many_keeps_what_is_free_and_those_behind_get_the_rest():
    live = running(1, "GPU-0")
    big, small, other = job(2, gpus=8), job(3, gpus=1), job(4)
    decided = decide([live, big, small, other], host(leases={"GPU-0": "j1"}))
    assert given_to(decided) == {4: []}
    assert "kept for job name2 (j2), which comes first" in reasons(decided)[3]
    decided = decide([big, small], host())
    assert len(given_to(decided)[2]) == 8


def test_what_a_waiting_job_cannot_use_works_meanwhile():
    live = running(1, "GPU-0")
    big = job(2, gpus=2, gpu_memory_gib=60)
    small = job(3, gpus=1)
    decided = decide([live, big, small], host([gpu(0), gpu(1), gpu(2, total=24)], leases={"GPU-0": "j1"}))
    assert given_to(decided) == {3: ["2"]}


@pytest.mark.parametrize("trouble", ["used by pid 9 of another user, eve (70.0 GiB)", "not answering (GPU is lost)"])
def test_a_stranger_does_not_idle_the_other_gpus(trouble):
    gpus = [gpu(0, blocked=trouble), *EIGHT[1:]]
    decided = decide([job(1, gpus=8), job(2, gpus=7)], host(gpus))
    assert len(given_to(decided)[2]) == 7
    assert trouble in reasons(decided)[1]


def test_named_gpus_and_no_others():
    decided = decide([job(1, gpu_ids=("GPU-5", "GPU-2")), job(2, gpu_ids=("GPU-5",))], host())
    assert given_to(decided) == {1: ["2", "5"]}
    assert reasons(decided)[2] == "waiting for 1 GPU (GPU-5); GPU 5 is used by job name1 (j1)"


def test_without_word_from_nvml_no_gpu_is_given_and_the_others_go_on():
    silent = host((), gpus_unknown="NVML has not answered for 12 s")
    train = job(2, stage="train", params={"device": "auto"})
    jobs = [job(1, gpus=1), train, job(3), job(4, gpus=2, gpu_memory_gib=8)]
    decided = decide(jobs, silent)
    assert given_to(decided) == {3: []}
    assert reasons(decided) == {
        1: "waiting for 1 GPU; NVML has not answered for 12 s",
        2: "waiting for a look at the GPUs; NVML has not answered for 12 s",
        4: "waiting for 2 GPUs with 8 GiB free; NVML has not answered for 12 s",
    }


def test_cpus_and_memory_add_up():
    live = running(1, "GPU-0", cpus=12, ram_gib=60)
    decided = decide([live, job(2, gpus=1, cpus=8), job(3, gpus=1, cpus=4, ram_gib=1)], host(leases={"GPU-0": "j1"}))
    assert reasons(decided) == {
        2: "waiting for 8 CPUs; 4 of 16 are not asked for",
        3: "waiting for 4 CPUs; 0 of 16 are not asked for, and job name2 (j2) comes first",
    }
    decided = decide([live, job(2, gpus=1, ram_gib=8), job(3, gpus=1, cpus=4)], host(leases={"GPU-0": "j1"}))
    assert reasons(decided) == {2: "waiting for 8 GiB of memory; 4.0 GiB of 64.0 GiB are not asked for"}
    assert given_to(decided) == {3: ["2"]}  # GPU 1 is kept


def test_places_bound_only_jobs_without_a_gpu():
    decided = decide([running(1, "GPU-0"), job(2), job(3), job(4, gpus=1)], host(leases={"GPU-0": "j1"}))
    assert given_to(decided) == {2: [], 4: ["1"]}
    assert reasons(decided)[3] == "1 job without a GPU runs at a time (EYAS_MAX_RUNNING)"


def test_a_gpu_whose_last_processes_are_still_ending_is_not_free():
    decided = decide([job(2, gpus=1)], host([gpu(0)], leases={"GPU-0": "j1"}))
    assert "GPU 0 is used by job (j1), whose processes are not all gone yet" in reasons(decided)[2]


def test_what_the_host_can_no_longer_give_is_said_and_holds_nobody_up():
    decided = decide([job(1, gpus=9), job(2, gpus=8)], host())
    assert reasons(decided) == {
        1: "this host cannot give what it asks for: 9 GPUs are asked for; this host has 8 that jobs may be given"
    }


@st.composite
def situations(draw):
    """Jobs that run on some GPUs, jobs that wait for others, strangers on some."""
    count = draw(st.integers(0, 6))
    owners = draw(st.lists(st.sampled_from([None, 101, 102]), min_size=count, max_size=count))
    gpus = [
        gpu(place, total=draw(st.sampled_from([24, 80])), blocked=draw(st.sampled_from([None, None, "used by eve"])))
        for place in range(count)
    ]
    leases = {f"GPU-{place}": f"j{owner}" for place, owner in enumerate(owners) if owner is not None}
    live = [
        running(owner, *[uuid for uuid, holder in leases.items() if holder == f"j{owner}"])
        for owner in {owner for owner in owners if owner is not None}
    ]
    waiting = [
        job(
            number,
            priority=draw(st.integers(-1, 1)),
            gpus=draw(st.integers(0, 3)),
            gpu_memory_gib=None,
            cpus=draw(st.sampled_from([None, 1, 9])),
            ram_gib=draw(st.sampled_from([None, 1.0, 40.0])),
        )
        for number in range(1, draw(st.integers(1, 6)) + 1)
    ]
    return [*live, *waiting], host(gpus, leases, gpus_unknown=draw(st.sampled_from([None, None, None, "silent"])))


@given(situations())
def test_no_gpu_twice_nothing_over_and_a_reason_for_each_wait(situation):
    jobs, there = situation
    decided = decide(jobs, there)
    assert {d.job.number for d in decided} == {one.number for one in jobs if one.state == JobState.QUEUED}
    given_out = [ref.uuid for d in decided if isinstance(d, Start) for ref in d.gpus]
    assert len(given_out) == len(set(given_out))
    blocked = {one.uuid for one in there.gpus if one.blocked} | set(there.leases)
    assert not set(given_out) & blocked
    assert not given_out or there.gpus_unknown is None
    started = [d.job for d in decided if isinstance(d, Start)]
    live = [one for one in jobs if one.state == JobState.RUNNING]
    assert sum(one.resources.cpus or 0 for one in started + live) <= there.cpus
    assert sum(one.resources.ram_gib or 0 for one in started + live) * GIB <= there.ram_bytes
    assert sum(one.resources.gpus == 0 for one in started) <= 1
    assert all(len(d.gpus) == d.job.resources.gpus for d in decided if isinstance(d, Start))
    assert all(d.waiting for d in decided if isinstance(d, Wait))


@given(situations())
def test_nobody_starts_who_would_not_without_those_behind(situation):
    """Whoever comes later never changes what one that comes first gets."""
    jobs, there = situation
    decided = decide(jobs, there)
    for place, decision in enumerate(decided):
        ahead = {d.job.number for d in decided[: place + 1]}
        fewer = [one for one in jobs if one.state != JobState.QUEUED or one.number in ahead]
        assert decide(fewer, there)[-1] == decision


@given(st.integers(1, 8), st.lists(st.integers(1, 3), min_size=1, max_size=12), st.randoms())
def test_a_job_that_waits_for_many_gpus_does_not_starve(count, others, random):
    """Small jobs come without end, each ends some time: the big one starts once those that ran before it are over."""
    uuids = [f"GPU-{place}" for place in range(8)]
    live = {100 + place: [uuid] for place, uuid in enumerate(uuids)}  # all GPUs are in use when it comes
    big, number = job(1000, gpus=count), 1000
    queue = [big]
    for turn in range(30):
        for wanted in others:
            number += 1
            queue.append(job(number, gpus=wanted))
        leases = {uuid: f"j{owner}" for owner, held in live.items() for uuid in held}
        decided = decide([*(running(owner, *held) for owner, held in live.items()), *queue], host(leases=leases))
        for decision in decided:
            if isinstance(decision, Start):
                live[decision.job.number] = [ref.uuid for ref in decision.gpus]
                queue = [one for one in queue if one.number != decision.job.number]
        if big not in queue:
            return
        ends = random.choice(sorted(live))
        del live[ends]
        assert turn < 29


def test_what_a_stage_gets_that_does_not_say():
    def gpus(stage, gpus=EIGHT, **params):
        return resolve(Resources(), stage, params, gpus).gpus

    assert [gpus("train", device=device) for device in ("auto", "cuda", "cpu")] == [1, 1, 0]
    assert [gpus("external", argv=["/x"]), gpus("prepare"), gpus("validate")] == [1, 0, 0]
    assert [gpus("train", (), device="auto"), gpus("external", ())] == [0, 0]
    assert resolve(Resources(), "train", {"device": "cuda:3"}, EIGHT).gpu_ids == ("GPU-3",)
    assert resolve(Resources(gpu_memory_gib=20), "prepare", {}, EIGHT).gpus == 1
    assert resolve(Resources(gpus=0), "external", {}, EIGHT).gpus == 0


@pytest.mark.parametrize(
    ("asked", "params", "field", "text"),
    [
        ({"gpus": 9}, {}, "gpus", "9 GPUs are asked for; this host has 8 that jobs may be given"),
        ({"gpu_ids": ["8"]}, {}, "gpu_ids", "there is no GPU 8 that jobs may be given; there are: 0 (GPU-0), 1"),
        ({"gpu_ids": ["GPU-x"]}, {}, "gpu_ids", "there is no GPU GPU-x"),
        ({"gpu_ids": [1, "GPU-1"]}, {}, "gpu_ids", "twice, by index and by UUID"),
        ({"gpu_memory_gib": 81}, {}, "gpu_memory_gib", "asked for with 81 GiB; this host has GPU 0: 80.0 GiB"),
        ({}, {"device": "cuda:8"}, "device", "there is no GPU 8"),
    ],
)
def test_what_this_host_can_never_give(asked, params, field, text):
    with pytest.raises(CannotBeMet) as refused:
        resolve(Resources(**asked), "train", params, EIGHT)
    assert refused.value.field == field
    assert text in refused.value.message


@pytest.mark.parametrize(
    ("asked", "device", "text"),
    [
        ({"gpus": 1}, "cpu", "say device cpu"),
        ({"gpus": 0}, "cuda", "needs a GPU"),
        ({"gpus": 2}, "cuda:2", "these are 2"),
        ({"gpus": 0, "gpu_memory_gib": 8}, None, "gpus is 0"),
    ],
)
def test_resources_that_contradict_the_device(asked, device, text):
    with pytest.raises(CannotBeMet, match=text):
        check_device(Resources(**asked), device)


def test_more_than_the_host_has():
    for asked in ({"cpus": 17}, {"ram_gib": 64.5}):
        with pytest.raises(CannotBeMet, match="this host has"):
            check_host(Resources(**asked), 16, 64 * GIB)


def test_a_process_can_use_one_mig_instance_only():
    instances = [Gpu(f"0:{number}", f"MIG-{number}", None, 40 * GIB, 40 * GIB) for number in range(2)]
    assert given_to(decide([job(1, gpus=1)], host(instances))) == {1: ["0:0"]}
    with pytest.raises(CannotBeMet, match="no more than one MIG instance"):
        resolve(Resources(gpus=2), "train", {}, instances)


@pytest.mark.parametrize(
    "asked",
    [{"gpus": -1}, {"gpus": 2, "gpu_ids": ["0"]}, {"gpu_ids": ["0", "0"]}, {"gpu_ids": ["all"]}, {"gpu_ids": ["0,1"]}],
)
def test_requests_that_mean_nothing(asked):
    with pytest.raises(ValidationError):
        Resources(**asked)


def test_the_environment_of_a_job():
    refs = [GpuRef(index="1", uuid="GPU-b", name=None), GpuRef(index="0:1", uuid="MIG-a", name=None)]
    assert environment_of(Resources(cpus=4), refs, hide=True) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-b,MIG-a",
        "OMP_NUM_THREADS": "4",
    }
    assert environment_of(Resources(), [], hide=True) == {"CUDA_VISIBLE_DEVICES": ""}
    assert environment_of(Resources(), [], hide=False) == {}
