# thinpipe from its own wheel, for a user without rights. How to build and run it: docs/howto/cloud-gpus.md
ARG PYTHON=docker.io/library/python:3.11-slim
FROM $PYTHON AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY .ci/constraints.txt .ci/constraints.txt
RUN pip install --no-cache-dir --constraint .ci/constraints.txt build hatchling hatch-vcs setuptools-scm
COPY src src
# There is no git here to tell the version.
ARG VERSION=0.2.0.dev0
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_THINPIPE="$VERSION" python -m build --wheel --no-isolation --outdir /wheels

# Libraries in a virtual environment, which is all that the last stage takes: neither compilers nor caches.
FROM $PYTHON AS libraries
# The CPU build of torch by default; https://pypi.org/simple has the one with CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Which extras of pyproject.toml come with it.
ARG EXTRAS=swarm,report
COPY .ci/constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels
RUN python -m venv --without-pip /opt/thinpipe \
    && pip --python /opt/thinpipe install --no-cache-dir --index-url "$TORCH_INDEX" "torch$(sed -n 's/^torch==/==/p' /constraints.txt)" \
    && pip --python /opt/thinpipe install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[$EXTRAS]"

FROM $PYTHON
COPY --from=libraries /opt/thinpipe /opt/thinpipe
RUN useradd --create-home --uid 1000 thinpipe \
    && mkdir /work /shared \
    && chown thinpipe /work /shared
ENV PATH=/opt/thinpipe/bin:$PATH
USER thinpipe
WORKDIR /work
ENTRYPOINT ["thinpipe"]
CMD ["--help"]
