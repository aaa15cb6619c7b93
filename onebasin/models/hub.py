# SPDX-License-Identifier: Apache-2.0
"""Uploading a folder to the hub. Fetching from it is `locate`."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from .errors import ModelError, one_line


def upload(folder: str | Path, repository: str) -> str:
    """Upload a model folder to `owner/name` on the hub, which is made where it does not exist, and return its address.

    The token is the one that `hf auth login` or HF_TOKEN gives. The folder stays as it is. Raises ModelError where
    the hub cannot be reached or refuses.
    """
    if repository.count("/") != 1:
        raise ModelError(f"'{repository}' is no repository of the hub; write owner/name")
    api = HfApi()
    try:
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a model made with onebasin")
    except Exception as error:  # the client's own errors, and those of whichever transport it uses
        raise ModelError(
            f"'{folder}' is written, but the hub did not take it as '{repository}': {one_line(error)}"
        ) from None
    return str(address)
