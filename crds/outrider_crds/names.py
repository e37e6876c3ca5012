"""Types for names in Kubernetes: objects, labels, resources, variables and paths.

The patterns mean the same to the API server (RE2) and to pydantic (Rust's regex).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"

NAME_PATTERN = f"^{_LABEL}$"
DOMAIN_PATTERN = f"^{_DOMAIN}$"
LABEL_KEY_PATTERN = f"^({_DOMAIN}/)?{_NAME}$"
LABEL_VALUE_PATTERN = f"^({_NAME})?$"
RESOURCE_PATTERN = f"^{_DOMAIN}/{_NAME}$"
DATA_KEY_PATTERN = r"^\.?[-_A-Za-z0-9][-._A-Za-z0-9]*$"
VARIABLE_PATTERN = "^[A-Za-z_][A-Za-z0-9_]*$"
IMAGE_PATTERN = "^[!-~]+$"
ABSOLUTE_PATTERN = "^/"
BUCKET_PATTERN = "^s3://[a-z0-9][-a-z0-9.]{1,61}[a-z0-9](/[!-~]+)?$"
MOUNT_PATTERN = "^(/[^/:]+)+$"

Name = Annotated[str, StringConstraints(min_length=1, max_length=40, pattern=NAME_PATTERN)]
"""Name of a part of the resource (drafter, SLO class), which becomes part of other names."""
ObjectName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=DOMAIN_PATTERN)]
"""Name of an object in the service's namespace, or of a class of the cluster."""
Product = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
]
"""A label value that is also a folder name in the pod."""
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=LABEL_KEY_PATTERN)]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE_PATTERN)]
ResourceName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=RESOURCE_PATTERN)]
"""An extended resource: a domain, a slash and a name."""
DataKey = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=DATA_KEY_PATTERN)]
"""Key of an entry in a Secret or ConfigMap."""
VariableName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=VARIABLE_PATTERN)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=IMAGE_PATTERN)]
BucketUri = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=BUCKET_PATTERN)]
"""A folder in an S3 bucket."""
ServedName = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.:/@+]*$")
]
"""Name of a model in requests."""
HostFolder = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=ABSOLUTE_PATTERN)]
MountPath = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=MOUNT_PATTERN)]

# Rules check the keys: a CustomResourceDefinition has no pattern for them.
Labels = Annotated[dict[str, LabelValue], Field(max_length=32)]
