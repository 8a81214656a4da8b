"""What OpenAI's two APIs share: where they are, their key, and Azure's way of asking them."""

from __future__ import annotations

import os
from urllib.parse import quote

from steelyard.targets.endpoint import EndpointTarget

AZURE_KEY = "AZURE_OPENAI_API_KEY"
AZURE_BASE_URL = "AZURE_OPENAI_ENDPOINT"


class OpenAIEndpoint(EndpointTarget):
    """An API of OpenAI's, at OpenAI, at Azure (which an `api_version` or its host name tells), or anywhere else."""

    default_base_url = "https://api.openai.com/v1"
    base_url_variables = ("OPENAI_BASE_URL",)
    key_variables = ("OPENAI_API_KEY",)
    names_deployment = False
    """Whether Azure's path of the call names the deployment, which is the model."""

    @property
    def _is_azure(self) -> bool:
        return self.api_version is not None or self._address.is_azure

    def _key_names(self) -> tuple[str, ...]:
        return (AZURE_KEY, *self.key_variables) if self._is_azure else self.key_variables

    def _usual_base_url(self) -> str:
        azure = os.environ.get(AZURE_BASE_URL, "").strip() if self.api_version is not None else ""
        return azure or super()._usual_base_url()

    def _key_header(self, key: str) -> tuple[str, str]:
        return ("api-key", key) if self._is_azure else super()._key_header(key)

    def _make_url(self) -> str:
        if self.api_version is None:
            return self._address.url(self.path)
        return self._address.url(self._azure_path(), f"api-version={quote(self.api_version, safe='')}")

    def _azure_path(self) -> str:
        """What is missing between a resource's address and the call; nothing, where the base URL says it all."""
        path = self._address.path
        if path.endswith("/v1") or "/deployments/" in path:
            return self.path
        place = "" if path.endswith("/openai") else "/openai"
        if self.names_deployment:
            place += f"/deployments/{quote(self.model_id, safe='')}"
        return place + self.path
