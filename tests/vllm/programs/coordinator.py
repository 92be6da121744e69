"""Runs vLLM's own DP coordinator, one process per line of input. Run by vLLM's python.

vLLM is imported once; every coordinator is a fork, which lives until the next line or the end of input.
"""

import json
import multiprocessing
import sys
import tempfile

from vllm.v1.engine.coordinator import DPCoordinatorProc


def start(question: dict) -> multiprocessing.Process:
    folder = tempfile.mkdtemp()
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=DPCoordinatorProc.run_coordinator,
        kwargs={
            "engine_count": question["engine_count"],
            "front_publish_address": f"ipc://{folder}/front",
            "back_output_address": f"ipc://{folder}/output",
            "back_publish_address": f"ipc://{folder}/back",
            "zmq_addr_pipe": sending,
            "enable_wave_coordination": question["lock_step"],
        },
        daemon=True,
    )
    process.start()
    front, output, back = receiving.recv()
    answer = {"front_publish": front, "back_output": output, "back_publish": back}
    print("ANSWER " + json.dumps(answer), flush=True)
    return process


def main() -> None:
    for line in sys.stdin:
        coordinator = start(json.loads(line))
        sys.stdin.readline()  # the test is over
        coordinator.kill()
        coordinator.join()


if __name__ == "__main__":
    main()
