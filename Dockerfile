# syntax=docker/dockerfile:1
# Two images from one recipe; `make images` builds all of them:
#   docker build --target router -t diptych-router .
#   docker build --target worker --build-arg ACCELERATOR=cpu --build-arg TORCH_INDEX=... -t diptych-worker .
#   docker build --target worker --build-arg ENGINE=vllm -t diptych-worker .     # on vLLM's image, for --engine vllm
# A release names the base by digest (PYTHON_IMAGE=...@sha256:...) and sets SOURCE_DATE_EPOCH to its commit's time. What is
# installed is pinned: by hash in helm/images/*.txt there; torch of another index than PyPI by version, in the build that
# TORCH_INDEX has. pip's own settings (another index) come in as the build secret `pip`, a pip.conf: --secret id=pip,src=pip.conf

# cpu, cuda (NVIDIA) or rocm (AMD): what the worker computes on. PyPI's torch for Linux on x86-64 is the build for cuda.
ARG ACCELERATOR=cuda
# Address of a package index with torch for the accelerator, beside pip's own; empty: the build that pip's own index has.
ARG TORCH_INDEX=
# The CUDA version that the node's driver must support at least, for ACCELERATOR=cuda: that of torch's build. 13.0 needs driver
# 580; for older drivers use 12.8 and a TORCH_INDEX with builds for it.
ARG CUDA_VERSION=13.0
# yes: with NIXL, for --kv-transport nixl (RDMA). The image with vLLM always has it.
ARG NIXL=no
# diptych, or vllm: with vLLM for --engine vllm, on the image VLLM_IMAGE, whose release must be the tested one.
ARG ENGINE=diptych
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# ------------------------------------------------------------------ wheel: Diptych itself, the same bytes for the same tree
FROM ${PYTHON_IMAGE} AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ARG SOURCE_DATE_EPOCH=0
# The CPU's kernels are compiled here for every instruction set, and chosen where they run.
ARG KERNELS=all
ENV DIPTYCH_KERNELS=${KERNELS}
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY . .
ARG VERSION=0.1.0
RUN echo "${VERSION}" > common/version.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip wheel --no-deps --wheel-dir /wheels .

# ------------------------------------------------------------------ what both images share
FROM ${PYTHON_IMAGE} AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Diptych" \
      org.opencontainers.image.description="Disaggregated prefill/decode serving of large language models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 \
    HOME=/var/cache/diptych DIPTYCH_CACHE=/var/cache/diptych HF_HOME=/var/cache/diptych/huggingface
# The root file system may be read-only: what is written goes to the cache, a volume, and to /tmp.
RUN groupadd --gid 10001 diptych \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/diptych --shell /usr/sbin/nologin diptych \
    && install -d -o 10001 -g 10001 /var/cache/diptych
COPY helm/images/*.txt /etc/diptych/

# ------------------------------------------------------------------ router: no torch
FROM base AS router
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip install --compile --require-hashes -r /etc/diptych/router.txt \
    && python -m pip install --compile --no-deps --no-index /wheels/diptych-*.whl \
    && python -m pip check
USER 10001:10001
WORKDIR /var/cache/diptych
VOLUME /var/cache/diptych
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:8000/health'), timeout=4)"]
ENTRYPOINT ["diptych"]
CMD ["router", "--help"]

# ------------------------------------------------------------------ what a worker needs of its system, by accelerator
FROM base AS system-cpu

# Triton compiles what launches its kernels, once, into the cache: GPU images carry a C compiler, the others none.
FROM base AS system-cuda
ARG CUDA_VERSION
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# NVIDIA's container runtime mounts the driver's libraries, and refuses to start on a driver that is too old.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_REQUIRE_CUDA="cuda>=${CUDA_VERSION}"

# ROCm's libraries come with torch; the node brings the kernel driver, and the pod the devices.
FROM base AS system-rocm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# ------------------------------------------------------------------ worker: torch
# hadolint ignore=DL3006
FROM system-${ACCELERATOR} AS worker-diptych
ARG ACCELERATOR
ARG TORCH_INDEX
ARG CUDA_VERSION
ARG NIXL
LABEL diptych.accelerator="${ACCELERATOR}"
# The linter does not see PIP_NO_CACHE_DIR of the stage `base`, and that "$@" is pinned.
# hadolint ignore=DL3013,DL3042
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip install --compile --require-hashes -r /etc/diptych/worker.txt \
    && if [ "${ACCELERATOR}" = cuda ] && [ -z "${TORCH_INDEX}" ]; then set -- --require-hashes -r /etc/diptych/cuda.txt; \
else set -- ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c /etc/diptych/constraints.txt torch; fi \
    && python -m pip install --compile "$@" \
    && python -c "import sys, torch; build = 'rocm' if torch.version.hip else 'cuda' if torch.version.cuda else 'cpu'; \
build == '${ACCELERATOR}' or sys.exit(f'torch is built for {build}, not for ${ACCELERATOR}: set TORCH_INDEX to an index with that'); \
torch.version.cuda in (None, '${CUDA_VERSION}') or sys.exit(f'torch is built for CUDA {torch.version.cuda}, not for ${CUDA_VERSION}')" \
    && if [ "${NIXL}" = yes ]; then python -m pip install --compile --no-deps --require-hashes -r /etc/diptych/nixl.txt; fi \
    && python -m pip install --compile --no-deps --no-index /wheels/diptych-*.whl \
    && python -m pip check

# ------------------------------------------------------------------ worker with vLLM: Diptych on vLLM's own image
FROM ${VLLM_IMAGE} AS worker-vllm
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG ACCELERATOR
LABEL org.opencontainers.image.title="Diptych" \
      org.opencontainers.image.description="Disaggregated prefill/decode serving of large language models, with vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      diptych.accelerator="${ACCELERATOR}"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1 \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 \
    HOME=/var/cache/diptych DIPTYCH_CACHE=/var/cache/diptych HF_HOME=/var/cache/diptych/huggingface \
    VLLM_NO_USAGE_STATS=1
# vLLM's image determines the versions of most packages, so only what it lacks is added, and vLLM stays as it is.
# The wheel is the argument of `set`, because an extra cannot follow a pattern of file names.
# hadolint ignore=DL3013,DL3042
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    groupadd --gid 10001 diptych \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/diptych --shell /usr/sbin/nologin diptych \
    && install -d -o 10001 -g 10001 /var/cache/diptych \
    && python3 -c "from importlib.metadata import version as of; [print(f'{name}=={of(name)}') for name in ('vllm', 'torch')]" \
       > /etc/diptych-vllm.txt \
    && set -- /wheels/diptych-*.whl \
    && python3 -m pip install --compile -c /etc/diptych-vllm.txt "$1[worker,hub,nixl]" \
    && python3 -c "from common.config.vllm import check_installed, check_nixl; check_installed(); check_nixl()"

# ------------------------------------------------------------------ worker, with either engine
# hadolint ignore=DL3006
FROM worker-${ENGINE} AS worker
ENV TRITON_CACHE_DIR=/var/cache/diptych/triton
USER 10001:10001
WORKDIR /var/cache/diptych
VOLUME /var/cache/diptych
EXPOSE 7001 7002 7003
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=9 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:7003/health'), timeout=4)"]
ENTRYPOINT ["diptych"]
CMD ["decode-worker", "--help"]
