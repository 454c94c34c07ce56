#!/usr/bin/env python3
"""Runs the Python that starts an engine process so that the kernel kills it when its replica dies.

`multiprocessing` is told (`environment.prepare_process`) to start children through this file. It asks for SIGKILL on
the parent's death and becomes the real interpreter; the request survives exec. A replica that is killed therefore never
leaves an engine behind, however early it dies. Only the standard library is imported: this runs before every engine.
"""

import ctypes
import os
import signal
import sys

PARENT = "SLUICE_ENGINE_PARENT"
INTERPRETER = "SLUICE_ENGINE_INTERPRETER"

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # The resource tracker is started through here as well; it ends by itself, after cleaning up.
    if "--multiprocessing-fork" in sys.argv:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(os.environ[PARENT]):
            sys.exit("the replica died while it was starting its engine")
    interpreter = os.environ[INTERPRETER]
    os.execv(interpreter, [interpreter, *sys.argv[1:]])
