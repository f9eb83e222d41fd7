//! The kernel compiler: device sources in, objects for one architecture out, compiled at most once.
//!
//! Compilers run as child processes, never inside the worker: some abort on architectures they do not know. Objects are
//! cached by what they are made of; a cache that was filled elsewhere serves a machine without a compiler.

mod arch;
mod cache;
mod error;
mod inspect;
mod msgpack;
pub mod nvrtc;
mod settings;
pub mod tied;
mod toolchain;
mod workspace;

pub use arch::Arch;
pub use cache::CachedObject;
pub use error::CompileError;
pub use inspect::{KernelReport, inspect};
pub use settings::{ChildCommand, Settings};

pub(crate) use cache::hex;
use cache::{Cache, Key};
use spillway_kernels::hip::{DeviceSource, HEADERS};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, Once, PoisonError};
use toolchain::Toolchain;

/// A compiled source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Artifact {
    /// What [`crate::hip::Module::load`] takes.
    pub image: Vec<u8>,
    /// True when it came from the cache.
    pub cached: bool,
    /// What the compiler had to say; empty for a cached object.
    pub warnings: String,
}

/// Compiles device sources and keeps the results.
#[derive(Debug)]
pub struct KernelCompiler {
    settings: Settings,
    cache: Cache,
    found: Mutex<BTreeMap<Arch, Result<Arc<Toolchain>, CompileError>>>,
    /// Whether left-over folders were looked for, which the first build does.
    swept: Once,
}

impl KernelCompiler {
    /// A compiler with its cache. Nothing is looked for before it is needed.
    pub fn new(settings: Settings) -> Self {
        let cache = Cache::new(settings.cache.clone());
        Self { settings, cache, found: Mutex::new(BTreeMap::new()), swept: Once::new() }
    }

    /// The object of a source for an architecture: from the cache, or compiled now.
    ///
    /// # Errors
    /// There is neither a cached object nor a compiler, the source does not compile, or the cache cannot be written.
    pub fn compile(&self, source: &DeviceSource<'_>, arch: &Arch) -> Result<Artifact, CompileError> {
        let key = Key::new(source, arch);
        let toolchain = match self.toolchain(arch) {
            Ok(toolchain) => toolchain,
            Err(missing) => {
                let image = self.cache.find_any(&key).ok_or(missing)?;
                return Ok(Artifact { image, cached: true, warnings: String::new() });
            }
        };
        if let Some(image) = self.cache.find(&key, toolchain.identity()) {
            return Ok(Artifact { image, cached: true, warnings: String::new() });
        }
        let (image, warnings) = self.build(source, arch, &toolchain)?;
        self.cache.store(&key, toolchain.identity(), &image)?;
        Ok(Artifact { image, cached: false, warnings })
    }

    /// Compiles several sources, as many at a time as the machine has processors. Results keep the sources' order.
    pub fn compile_all(
        &self,
        sources: &[DeviceSource<'_>],
        arch: &Arch,
    ) -> Vec<Result<Artifact, CompileError>> {
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(sources.len().max(1));
        let next = std::sync::atomic::AtomicUsize::new(0);
        let results = Mutex::new(BTreeMap::new());
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    loop {
                        let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        let Some(source) = sources.get(at) else { break };
                        let result = self.compile(source, arch);
                        results.lock().unwrap_or_else(PoisonError::into_inner).insert(at, result);
                    }
                });
            }
        });
        results.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
    }

    /// What the cache holds.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn cached(&self) -> Result<Vec<CachedObject>, CompileError> {
        self.cache.list()
    }

    /// Removes everything from the cache; returns the number of bytes.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn clean(&self) -> Result<u64, CompileError> {
        self.cache.clean()
    }

    /// Which compiler serves an architecture, in words.
    ///
    /// # Errors
    /// None does.
    pub fn describe(&self, arch: &Arch) -> Result<String, CompileError> {
        self.toolchain(arch).map(|toolchain| toolchain.describe())
    }

    fn toolchain(&self, arch: &Arch) -> Result<Arc<Toolchain>, CompileError> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(result) = found.get(arch) {
            return result.clone();
        }
        let result = Toolchain::find(arch, &self.settings).map(Arc::new);
        found.insert(arch.clone(), result.clone());
        result
    }

    /// Compiles in a folder of its own, which is gone afterwards.
    fn build(
        &self,
        source: &DeviceSource<'_>,
        arch: &Arch,
        toolchain: &Toolchain,
    ) -> Result<(Vec<u8>, String), CompileError> {
        self.swept.call_once(|| workspace::sweep(&std::env::temp_dir()));
        let folder = workspace::folder()?;
        for header in HEADERS {
            write(&folder.path().join(header.name), header.text)?;
        }
        let input = folder.path().join(format!("{}.hip", source.name));
        let output = folder.path().join("object");
        write(&input, source.text)?;
        let mut compiler = toolchain.command(&input, &output);
        if let Some(child) = &self.settings.compiler_child {
            compiler = tied::command(child, &compiler);
        }
        // Whatever it leaves behind when it is killed is left in this folder.
        compiler.env("TMPDIR", folder.path()).stdin(Stdio::null());
        let run = compiler.output();
        let run =
            run.map_err(|error| CompileError::io("running the compiler", toolchain.program(), &error))?;
        let said = String::from_utf8_lossy(&run.stderr).trim().to_owned();
        if !run.status.success() {
            return Err(CompileError::Failed {
                kernel: source.name.to_owned(),
                arch: arch.clone(),
                compiler: toolchain.describe(),
                status: run.status.to_string(),
                message: said,
            });
        }
        let image = std::fs::read(&output)
            .map_err(|error| CompileError::io("reading the compiler's output", &output, &error))?;
        check_entries(source, arch, &image)?;
        Ok((image, said))
    }
}

/// A kernel that the table promises and the object lacks is noticed here rather than in the middle of a load.
fn check_entries(source: &DeviceSource<'_>, arch: &Arch, image: &[u8]) -> Result<(), CompileError> {
    let reports = inspect(image).map_err(|reason| CompileError::BadObject {
        kernel: source.name.to_owned(),
        arch: arch.clone(),
        reason,
    })?;
    for entry in source.entries {
        if !reports.iter().any(|report| report.name == *entry) {
            let reason = format!("it has no entry point {entry}");
            return Err(CompileError::BadObject {
                kernel: source.name.to_owned(),
                arch: arch.clone(),
                reason,
            });
        }
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), CompileError> {
    std::fs::write(path, text)
        .map_err(|error| CompileError::io("writing a source for the compiler", path, &error))
}
