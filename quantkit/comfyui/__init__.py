"""ComfyUI nodes that load packed pipelines. A custom node imports ``quantkit.comfyui.nodes``."""
