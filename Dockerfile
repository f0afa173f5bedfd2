# An image with `meshpoint` and everything that config/production.yaml needs.
#   docker build --tag meshpoint .
# Your agents: FROM meshpoint, then install their package with pip.
FROM python:3.12-slim

COPY pyproject.toml README.md LICENSE /build/
COPY src /build/src
COPY alembic /build/alembic
RUN pip install --no-cache-dir '/build[cli,postgresql,rabbitmq,redis,telemetry]' \
 && rm -r /build \
 && useradd --create-home --uid 10001 mesh
COPY config /mesh

USER 10001
WORKDIR /home/mesh
ENTRYPOINT ["meshpoint"]
CMD ["--help"]
