//! HIP's status codes (`hipError_t` of ROCm 5, 6 and 7: the numbers are the same in all three).

/// A status that a HIP function returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Status(pub u32);

macro_rules! statuses {
    ($($name:ident = $value:literal, $hip:literal, $text:literal;)*) => {
        $(#[doc = $text]
        pub const $name: Status = Status($value);)*

        /// All statuses by number: constant, HIP's name as a C string, meaning as a C string.
        pub const ALL: &[(Status, &std::ffi::CStr, &std::ffi::CStr)] = &[
            $((
                $name,
                // The literals hold no NUL, so the checked conversions cannot fail; they run at compile time.
                match std::ffi::CStr::from_bytes_with_nul(concat!($hip, "\0").as_bytes()) { Ok(s) => s, Err(_) => c"" },
                match std::ffi::CStr::from_bytes_with_nul(concat!($text, "\0").as_bytes()) { Ok(s) => s, Err(_) => c"" },
            ),)*
        ];
    };
}

statuses! {
    SUCCESS = 0, "hipSuccess", "success";
    INVALID_VALUE = 1, "hipErrorInvalidValue", "an argument is invalid";
    OUT_OF_MEMORY = 2, "hipErrorOutOfMemory", "out of memory";
    NOT_INITIALIZED = 3, "hipErrorNotInitialized", "the driver is not initialised";
    DEINITIALIZED = 4, "hipErrorDeinitialized", "the driver is shutting down";
    INVALID_CONFIGURATION = 9, "hipErrorInvalidConfiguration", "the launch configuration is invalid";
    INVALID_DEVICE_POINTER = 17, "hipErrorInvalidDevicePointer", "not an address of this device";
    INSUFFICIENT_DRIVER = 35, "hipErrorInsufficientDriver", "the driver is too old";
    NO_DEVICE = 100, "hipErrorNoDevice", "no device";
    INVALID_DEVICE = 101, "hipErrorInvalidDevice", "no such device";
    INVALID_IMAGE = 200, "hipErrorInvalidImage", "the kernel image is invalid";
    INVALID_CONTEXT = 201, "hipErrorInvalidContext", "the context is invalid";
    MAP_FAILED = 205, "hipErrorMapFailed", "mapping failed";
    NO_BINARY_FOR_GPU = 209, "hipErrorNoBinaryForGpu", "the kernel image is not for this GPU";
    ECC_NOT_CORRECTABLE = 214, "hipErrorECCNotCorrectable", "an uncorrectable memory error";
    PEER_ACCESS_UNSUPPORTED = 217, "hipErrorPeerAccessUnsupported", "peer access is not supported";
    INVALID_KERNEL_FILE = 218, "hipErrorInvalidKernelFile", "the kernel's text does not assemble";
    SHARED_OBJECT_SYMBOL_NOT_FOUND = 302, "hipErrorSharedObjectSymbolNotFound", "a symbol is missing in a shared object";
    SHARED_OBJECT_INIT_FAILED = 303, "hipErrorSharedObjectInitFailed", "a shared object could not be loaded";
    OPERATING_SYSTEM = 304, "hipErrorOperatingSystem", "the operating system refused a request";
    INVALID_HANDLE = 400, "hipErrorInvalidHandle", "the handle is invalid";
    ILLEGAL_STATE = 401, "hipErrorIllegalState", "the resource is in the wrong state";
    NOT_FOUND = 500, "hipErrorNotFound", "not found";
    NOT_READY = 600, "hipErrorNotReady", "not finished yet";
    ILLEGAL_ADDRESS = 700, "hipErrorIllegalAddress", "a kernel accessed an illegal address";
    LAUNCH_OUT_OF_RESOURCES = 701, "hipErrorLaunchOutOfResources", "the launch needs more resources than there are";
    LAUNCH_TIMEOUT = 702, "hipErrorLaunchTimeOut", "a kernel ran too long";
    PEER_ACCESS_ALREADY_ENABLED = 704, "hipErrorPeerAccessAlreadyEnabled", "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, "hipErrorPeerAccessNotEnabled", "peer access is not enabled";
    CONTEXT_IS_DESTROYED = 709, "hipErrorContextIsDestroyed", "the context is destroyed";
    ASSERT = 710, "hipErrorAssert", "a kernel's assertion failed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "hipErrorHostMemoryAlreadyRegistered", "host memory is already registered";
    HOST_MEMORY_NOT_REGISTERED = 713, "hipErrorHostMemoryNotRegistered", "host memory is not registered";
    LAUNCH_FAILURE = 719, "hipErrorLaunchFailure", "a kernel failed";
    NOT_SUPPORTED = 801, "hipErrorNotSupported", "not supported";
    CAPTURE_UNSUPPORTED = 900, "hipErrorStreamCaptureUnsupported", "not permitted while a stream is captured";
    CAPTURE_INVALIDATED = 901, "hipErrorStreamCaptureInvalidated", "the capture was invalidated by an earlier error";
    CAPTURE_UNMATCHED = 903, "hipErrorStreamCaptureUnmatched", "the stream is not being captured";
    CAPTURE_IMPLICIT = 906, "hipErrorStreamCaptureImplicit", "the captured stream would wait for the default stream";
    CAPTURED_EVENT = 907, "hipErrorCapturedEvent", "the event was recorded in a capture";
    UNKNOWN = 999, "hipErrorUnknown", "unknown error";
    RUNTIME_MEMORY = 1052, "hipErrorRuntimeMemory", "ROCm's runtime failed in a memory call";
    RUNTIME_OTHER = 1053, "hipErrorRuntimeOther", "ROCm's runtime failed";
}

/// After these the device context is unusable: only a new process gets the device back, if anything does.
const DEVICE_LOST: &[Status] = &[
    ECC_NOT_CORRECTABLE,
    ILLEGAL_ADDRESS,
    LAUNCH_TIMEOUT,
    CONTEXT_IS_DESTROYED,
    ASSERT,
    LAUNCH_FAILURE,
    UNKNOWN,
    RUNTIME_OTHER,
];

impl Status {
    /// True for success.
    pub fn is_success(self) -> bool {
        self == SUCCESS
    }

    /// True when every later call of this process on the device fails too.
    pub fn is_device_lost(self) -> bool {
        DEVICE_LOST.contains(&self)
    }

    /// HIP's name and the meaning; unknown numbers read as `hipErrorUnknown`.
    pub fn describe(self) -> (&'static std::ffi::CStr, &'static std::ffi::CStr) {
        let row = ALL.iter().find(|(status, _, _)| *status == self);
        row.map_or((c"hipErrorUnknown", c"unknown error"), |(_, name, text)| (name, text))
    }
}
