# SPDX-License-Identifier: Apache-2.0
"""Uploading a folder to the hub. Fetching from it is `locate`."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from .errors import ModelError, one_line


def upload(folder: str | Path, repository: str) -> str:
    """Upload a model folder to `owner/name` on the hub, create it if necessary, and return its address.

    The token is that of `hf auth login` or HF_TOKEN. Raises ModelError if the hub cannot be reached or refuses.
    """
    if repository.count("/") != 1:
        raise ModelError(f"'{repository}' is not a repository on the hub; write owner/name")
    api = HfApi()
    try:
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a model made with onebasin")
    except Exception as error:  # the client's own errors, and those of whichever transport it uses
        raise ModelError(f"'{folder}' is written, but its upload to '{repository}' failed: {one_line(error)}") from None
    return str(address)
