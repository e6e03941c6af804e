# syntax=docker/dockerfile:1
# Two images from one recipe:
#   docker build --target router -t diptych-router .
#   docker build --target worker -t diptych-worker .
# A release names the base by digest (PYTHON_IMAGE=...@sha256:...) and sets SOURCE_DATE_EPOCH to its commit's time; what is
# installed is held by image-constraints.txt. pip's own settings (another index, a CPU build of torch) come in as the build
# secret `pip`, a pip.conf: docker build --secret id=pip,src=pip.conf ...

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# ------------------------------------------------------------------ wheel: Diptych itself, the same bytes for the same tree
FROM ${PYTHON_IMAGE} AS wheel
ARG SOURCE_DATE_EPOCH=0
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY . .
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
COPY image-constraints.txt /etc/diptych/constraints.txt

# ------------------------------------------------------------------ router: no torch
FROM base AS router
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    WHEEL="$(echo /wheels/diptych-*.whl)" \
    && python -m pip install --compile -c /etc/diptych/constraints.txt "diptych[router,tracing,hub] @ file://${WHEEL}"
USER 10001:10001
WORKDIR /var/cache/diptych
VOLUME /var/cache/diptych
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:8000/health'), timeout=4)"]
ENTRYPOINT ["diptych"]
CMD ["router", "--help"]

# ------------------------------------------------------------------ worker: torch, and a compiler for this machine's kernels
FROM base AS worker
# Triton and the CPU kernels are compiled where they run, once, into the cache.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    WHEEL="$(echo /wheels/diptych-*.whl)" \
    && python -m pip install --compile -c /etc/diptych/constraints.txt "diptych[worker,hub] @ file://${WHEEL}"
ENV TRITON_CACHE_DIR=/var/cache/diptych/triton
USER 10001:10001
WORKDIR /var/cache/diptych
VOLUME /var/cache/diptych
EXPOSE 7001 7002 7003
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=9 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(os.environ.get('HEALTH_URL', 'http://127.0.0.1:7003/health'), timeout=4)"]
ENTRYPOINT ["diptych"]
CMD ["decode-worker", "--help"]
