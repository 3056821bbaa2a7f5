"""The browser app: pages pick, probes compute, figures draw."""
