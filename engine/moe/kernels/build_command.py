"""The system-dependent part of building the native kernels with setuptools. Nothing else imports it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig

from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]

REQUIRED = "PRIVATELLM_REQUIRE_KERNELS"
"""Variable of the environment with which an installation fails where a compiler does not build the kernels."""


class BuildKernels(build_ext):  # type: ignore[misc]
    """setuptools' command for C, with the options of the system that it builds on."""

    def finalize_options(self) -> None:
        super().finalize_options()
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        if os.environ.get(REQUIRED) and shutil.which(compiler):
            for extension in self.extensions or ():
                extension.optional = False
        if sys.platform == "linux":
            for extension in self.extensions or ():
                # The table of addresses of library functions is then read-only before anything runs.
                extension.extra_link_args += ["-Wl,-z,relro", "-Wl,-z,now"]
        elif sys.platform == "darwin" and platform.machine() == "arm64":
            # A Python for both kinds of Mac would compile for both. This program runs on one.
            os.environ.setdefault("ARCHFLAGS", "-arch arm64")
