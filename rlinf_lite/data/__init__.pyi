from .proto import DataProto as DataProto
from .proto import DataProtoError as DataProtoError
