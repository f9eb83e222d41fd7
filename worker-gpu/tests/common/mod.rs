//! A device with a stream and a kernel compiler, for tests.

#![allow(dead_code, reason = "every test binary uses its own part")]
#![allow(clippy::cast_possible_truncation, reason = "test data is small, or cut on purpose")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a step that fails is a test that fails")]

pub mod attention;
pub mod cases;
pub mod delta_net;
pub mod numbers;
pub mod operations;
pub mod products;
pub mod speed;

use bytemuck::Pod;
use spillway_kernels::formats::Format;
use spillway_kernels::hip::DeviceSource;
use spillway_kernels::pool::ThreadPool;
use spillway_worker_gpu::compile::{Arch, ChildCommand, CompileError, KernelCompiler, Settings};
use spillway_worker_gpu::hip::{
    Arg, Device, DeviceBuffer, Driver, Function, HipError, Launch, Module, Provider, Stream,
};
use spillway_worker_gpu::launch::Kernels;
use std::cell::OnceCell;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Sources of the tests' own kernels.
pub const PRELUDE_CHECK: DeviceSource<'static> = DeviceSource {
    name: "prelude_check",
    text: include_str!("../hip/prelude_check.hip"),
    entries: &[
        "check_exp_log",
        "check_exp2_fast",
        "check_halves",
        "check_rounding",
        "check_block",
        "check_dot4",
        "check_mma",
        "check_mma_facts",
    ],
};
pub const PLANTED_FAULTS: DeviceSource<'static> = DeviceSource {
    name: "planted_faults",
    text: include_str!("../hip/planted_faults.hip"),
    entries: &[
        "missing_barrier",
        "divergent_barrier",
        "divergent_shuffle",
        "too_much_shared",
        "past_the_end",
        "past_the_shared_end",
    ],
};

/// Compiler settings whose cache outlives the test, since nothing but content decides what is found in it.
pub fn settings() -> Settings {
    Settings { cache: PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("kernels"), ..Settings::from_env() }
}

/// One compiler for all tests of a binary.
pub fn compiler() -> &'static KernelCompiler {
    static COMPILER: OnceLock<KernelCompiler> = OnceLock::new();
    COMPILER.get_or_init(|| KernelCompiler::new(settings()))
}

/// Runs NVRTC in this test executable: see [`nvrtc_child`].
pub fn nvrtc_child_command() -> ChildCommand {
    ChildCommand {
        program: std::env::current_exe().unwrap(),
        arguments: ["nvrtc_child", "--exact", "--include-ignored", "--nocapture", "--"]
            .map(OsString::from)
            .to_vec(),
    }
}

/// The body of a test named `nvrtc_child`: does nothing unless it was started with a job.
pub fn nvrtc_child() {
    let job: Vec<OsString> = std::env::args_os().skip_while(|argument| argument != "--").skip(1).collect();
    if !job.is_empty() {
        match spillway_worker_gpu::compile::nvrtc::child(&job) {
            Ok(answer) => println!("\n{answer}"),
            Err(message) => panic!("{message}"),
        }
    }
}

/// True when the error only says that this machine lacks a compiler; prints so. With `SPILLWAY_REQUIRE_COMPILERS=1` that
/// is a failure.
pub fn skip(error: &CompileError) -> bool {
    let missing = matches!(error, CompileError::NoCompiler { .. });
    assert!(!missing || std::env::var_os("SPILLWAY_REQUIRE_COMPILERS").is_none_or(|v| v != "1"), "{error}");
    if missing {
        println!("skipped: {error}");
    }
    missing
}

/// What the CPU computes with: the reference for the operations of a model.
pub fn cpu() -> &'static (ThreadPool, spillway_kernels::matmul::Kernels, spillway_kernels::ops::Ops) {
    static CPU: OnceLock<(ThreadPool, spillway_kernels::matmul::Kernels, spillway_kernels::ops::Ops)> =
        OnceLock::new();
    CPU.get_or_init(|| {
        let kernels = spillway_kernels::matmul::Kernels::from_env().unwrap();
        (ThreadPool::new(1).unwrap(), kernels, spillway_kernels::ops::Ops::new(kernels.set()).unwrap())
    })
}

/// A device to run kernels on.
pub struct Bench<'a> {
    pub device: Device,
    pub stream: Stream,
    pub arch: Arch,
    pub compiler: &'a KernelCompiler,
    kernels: OnceCell<Kernels>,
}

impl<'a> Bench<'a> {
    pub fn open(provider: &str, compiler: &'a KernelCompiler) -> Result<Self, HipError> {
        let driver = Driver::open(&provider.parse::<Provider>()?)?;
        let device = Device::open(&driver, 0)?;
        let stream = Stream::new(&device)?;
        let arch = device.info().arch.parse().unwrap();
        Ok(Self { device, stream, arch, compiler, kernels: OnceCell::new() })
    }

    /// Lanes of a wave of this device's kernels.
    pub fn wave(&self) -> u32 {
        match &self.arch {
            Arch::Amd(name) if name.starts_with("gfx9") => 64,
            Arch::Emulated { wave } => *wave,
            _ => 32,
        }
    }

    /// The operations of a model, for every weight format.
    pub fn kernels(&self) -> &Kernels {
        self.kernels.get_or_init(|| Kernels::load(&self.device, self.compiler, &Format::ALL).unwrap())
    }

    pub fn function(&self, source: &DeviceSource<'_>, entry: &str) -> Function {
        let artifact = self.compiler.compile(source, &self.arch).unwrap();
        Module::load(&self.device, source.name, &artifact.image).unwrap().function(entry).unwrap()
    }

    /// A kernel of the product.
    pub fn kernel(&self, name: &str) -> Function {
        self.function(spillway_kernels::hip::source(name).unwrap(), name)
    }

    pub fn upload<T: Pod>(&self, values: &[T]) -> DeviceBuffer {
        let bytes = bytemuck::cast_slice(values);
        let buffer = self.device.allocate("test input", bytes.len()).unwrap();
        self.device.write(buffer.slice(), bytes).unwrap();
        buffer
    }

    pub fn empty<T: Pod>(&self, count: usize) -> DeviceBuffer {
        self.device.allocate("test output", count * size_of::<T>()).unwrap()
    }

    pub fn download<T: Pod>(&self, buffer: &DeviceBuffer) -> Vec<T> {
        let mut values = vec![T::zeroed(); buffer.len() / size_of::<T>()];
        self.stream.synchronize().unwrap();
        self.device.read(bytemuck::cast_slice_mut(&mut values), buffer.slice()).unwrap();
        values
    }

    pub fn launch(&self, function: &Function, launch: Launch, args: &[Arg]) {
        // SAFETY: the cases pass what the kernels of this repository declare.
        unsafe { self.stream.launch(function, launch, args) }.unwrap();
    }
}

/// Kernel arguments: `args![&buffer, 5u32, 1e-6f32]`.
#[macro_export]
macro_rules! args {
    ($($value:expr),* $(,)?) => { &[$($crate::common::IntoArg::arg(&$value)),*] };
}

/// What [`args!`] takes.
pub trait IntoArg {
    fn arg(&self) -> Arg;
}
impl IntoArg for &DeviceBuffer {
    fn arg(&self) -> Arg {
        self.slice().into()
    }
}
impl IntoArg for u32 {
    fn arg(&self) -> Arg {
        (*self).into()
    }
}
impl IntoArg for f32 {
    fn arg(&self) -> Arg {
        (*self).into()
    }
}
