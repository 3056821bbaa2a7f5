"""Prompts to begin with, one for each thing that heads are known to do."""

from __future__ import annotations

NEEDLE = (
    "The harbour opens at six. The library keeps maps of the coast. The code of the blue door is 7412. "
    "Fishing boats return at noon. The baker sells rye bread. Question: what is the code of the blue door? Answer:"
)
REPEATED = "the cat the dog the cat the dog the cat the"
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return area("
SCRIPTS = "Good morning, Grüß Gott, こんにちは, صباح الخير, здравствуйте, नमस्ते, naïve café 🙂"

PRESETS: dict[str, str] = {
    "Needle": NEEDLE,
    "Repeats": REPEATED,
    "Code": CODE,
    "Scripts": SCRIPTS,
}
