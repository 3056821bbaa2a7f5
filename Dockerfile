FROM python:3.11-slim

# Chromium draws the images that kaleido exports; the fonts show every script a prompt may hold.
RUN apt-get update \
 && apt-get install -y --no-install-recommends chromium fonts-noto-core fonts-noto-cjk \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home dexviz

# Where packages come from, for those who build behind a mirror: --build-arg PIP_INDEX_URL=…
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

WORKDIR /srv/dexviz
COPY requirements.txt constraints.txt ./
RUN pip install --no-cache-dir -r requirements.txt -c constraints.txt
COPY --chown=dexviz:dexviz . .
RUN pip install --no-cache-dir --no-deps --editable .

USER dexviz
ENV DEXVIZ_HOME=/home/dexviz/.cache/dexviz
# The first capture compiles the loops that all later ones use.
RUN python -m dexviz fetch smollm2-135m \
 && python -m dexviz capture --adapter default --prompt "Compile the loops." --pool 64 --similarity

EXPOSE 8501
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8501/_stcore/health', timeout=4)"]
CMD ["python", "-m", "dexviz", "serve", "--address", "0.0.0.0", "--port", "8501"]
