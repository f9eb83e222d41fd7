//! NVIDIA's run-time compiler, in a process of its own.
//!
//! The compiler is a library that may abort or leak; the worker therefore runs its own executable again as [`child`].

use crate::hip::api::function_table;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use spillway_kernels::hip::HEADERS;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::NonNull;

/// Asks the child whether the library works, instead of compiling.
pub const PROBE: &str = "--probe";

/// Starts the line in which the child answers a probe.
pub const VERSION_PREFIX: &str = "NVRTC ";

/// Options besides the architecture: as for clang, nothing is contracted.
const OPTIONS: &[&CStr] = &[c"--std=c++17", c"--fmad=false"];

/// `nvrtcResult`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
struct NvrtcResult(c_int);

/// `nvrtcProgram`
type RawProgram = *mut c_void;

function_table! {
    /// libnvrtc; declarations follow `nvrtc.h` of CUDA 12.
    struct Nvrtc returning NvrtcResult;
    required {
        get_error_string = "nvrtcGetErrorString"(NvrtcResult) -> *const c_char;
        version = "nvrtcVersion"(*mut c_int, *mut c_int);
        get_num_supported_archs = "nvrtcGetNumSupportedArchs"(*mut c_int);
        get_supported_archs = "nvrtcGetSupportedArchs"(*mut c_int);
        create_program = "nvrtcCreateProgram"(
            *mut RawProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        compile_program = "nvrtcCompileProgram"(RawProgram, c_int, *const *const c_char);
        destroy_program = "nvrtcDestroyProgram"(*mut RawProgram);
        get_program_log_size = "nvrtcGetProgramLogSize"(RawProgram, *mut usize);
        get_program_log = "nvrtcGetProgramLog"(RawProgram, *mut c_char);
        get_cubin_size = "nvrtcGetCUBINSize"(RawProgram, *mut usize);
        get_cubin = "nvrtcGetCUBIN"(RawProgram, *mut c_char);
        get_ptx_size = "nvrtcGetPTXSize"(RawProgram, *mut usize);
        get_ptx = "nvrtcGetPTX"(RawProgram, *mut c_char);
    }
    optional {}
}

/// Runs one job: `<library> <compute capability> --probe`, or `<library> <compute capability> <input> <output>`, with
/// headers in memory. Returns what to print on success.
///
/// # Errors
/// A message for stderr: what is wrong with the arguments, the library or the source.
pub fn child(arguments: &[OsString]) -> Result<String, String> {
    let [library, number, job @ ..] = arguments else {
        return Err("usage: <library> <compute capability> --probe | <input> <output>".to_owned());
    };
    let number = number.to_str().and_then(|number| number.parse::<c_int>().ok());
    let number = number.ok_or("the second argument is no compute capability")?;
    let nvrtc = open(Path::new(library))?;
    match job {
        [probe] if probe == PROBE => nvrtc.version_line(),
        [input, output] => {
            let object = nvrtc.compile(number, Path::new(input))?;
            std::fs::write(output, object)
                .map_err(|error| format!("{}: {error}", Path::new(output).display()))?;
            Ok(String::new())
        }
        _ => Err("give --probe, or an input and an output".to_owned()),
    }
}

/// Opens the library, and before it its built-ins from the same folder: it would look for them in the search path only.
fn open(path: &Path) -> Result<Nvrtc, String> {
    let siblings = path.parent().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten();
    let builtins = siblings.filter_map(Result::ok).map(|entry| entry.path()).filter(|candidate| {
        candidate
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("libnvrtc-builtins.so"))
    });
    for library in builtins {
        // SAFETY: a library of data that the compiler reads; it stays loaded for this short-lived process.
        if let Ok(library) = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_GLOBAL) } {
            std::mem::forget(library);
        }
    }
    // SAFETY: loading the compiler that the user has installed or named; it stays loaded, see above.
    let library = unsafe { Library::open(Some(path), RTLD_NOW) }.map_err(|error| error.to_string())?;
    let find = |symbol: &'static str| {
        // SAFETY: only the address is taken.
        let address = unsafe { library.get::<*mut c_void>(symbol.as_bytes()) };
        address.ok().and_then(|address| NonNull::new(address.into_raw()))
    };
    // SAFETY: the declarations above are those of nvrtc.h, and the library is never unloaded.
    let table = unsafe { Nvrtc::look_up(find) };
    std::mem::forget(library);
    table.map_err(|symbol| format!("{} has no function {symbol}; install CUDA 12 or later", path.display()))
}

/// A program, destroyed on drop.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    raw: RawProgram,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is live and dies here; a failure has no consequence.
        let _ = unsafe { (self.nvrtc.destroy_program)(&mut self.raw) };
    }
}

type GetSize = unsafe extern "C" fn(RawProgram, *mut usize) -> NvrtcResult;
type GetBytes = unsafe extern "C" fn(RawProgram, *mut c_char) -> NvrtcResult;

impl Nvrtc {
    fn check(&self, result: NvrtcResult, call: &str) -> Result<(), String> {
        if result.0 == 0 {
            return Ok(());
        }
        // SAFETY: the function returns a static string.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(result)) };
        Err(format!("{call}: {} ({})", text.to_string_lossy(), result.0))
    }

    fn version_line(&self) -> Result<String, String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the function writes two numbers.
        self.check(unsafe { (self.version)(&mut major, &mut minor) }, "nvrtcVersion")?;
        Ok(format!("{VERSION_PREFIX}{major}.{minor}"))
    }

    /// The newest architecture that the library knows and the device runs.
    fn best_arch(&self, wanted: c_int) -> Result<c_int, String> {
        let mut count = 0;
        // SAFETY: the function writes one number.
        self.check(unsafe { (self.get_num_supported_archs)(&mut count) }, "nvrtcGetNumSupportedArchs")?;
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the function writes as many numbers as it has just announced.
        self.check(unsafe { (self.get_supported_archs)(archs.as_mut_ptr()) }, "nvrtcGetSupportedArchs")?;
        let best = archs.into_iter().filter(|arch| *arch <= wanted).max();
        best.ok_or_else(|| {
            format!("this NVRTC compiles for nothing that a device of capability {wanted} runs")
        })
    }

    /// Machine code for a device that the library knows, assembly text for a newer one.
    fn compile(&self, wanted: c_int, input: &Path) -> Result<Vec<u8>, String> {
        let text = std::fs::read(input).map_err(|error| format!("{}: {error}", input.display()))?;
        let text = CString::new(text).map_err(|_| "the source holds a NUL".to_owned())?;
        let name = CString::new(input.file_name().unwrap_or_default().as_encoded_bytes()).unwrap_or_default();
        let best = self.best_arch(wanted)?;
        let real = best == wanted;

        let program = self.create(&text, &name)?;
        let kind = if real { "sm" } else { "compute" };
        let arch = CString::new(format!("--gpu-architecture={kind}_{best}")).unwrap_or_default();
        let options: Vec<*const c_char> =
            OPTIONS.iter().map(|option| option.as_ptr()).chain([arch.as_ptr()]).collect();
        // SAFETY: the program is live; the options outlive the call.
        let compiled = unsafe { (self.compile_program)(program.raw, count(options.len()), options.as_ptr()) };
        let log =
            self.bytes(&program, self.get_program_log_size, self.get_program_log, "nvrtcGetProgramLog")?;
        let log = String::from_utf8_lossy(log.strip_suffix(&[0]).unwrap_or(&log)).trim().to_owned();
        self.check(compiled, "nvrtcCompileProgram").map_err(|error| format!("{error}\n{log}"))?;
        if real {
            self.bytes(&program, self.get_cubin_size, self.get_cubin, "nvrtcGetCUBIN")
        } else {
            let mut text = self.bytes(&program, self.get_ptx_size, self.get_ptx, "nvrtcGetPTX")?;
            text.pop_if(|last| *last == 0);
            Ok(text)
        }
    }

    fn create(&self, text: &CStr, name: &CStr) -> Result<Program<'_>, String> {
        let owned = |text: &str| CString::new(text).unwrap_or_default();
        let texts: Vec<CString> = HEADERS.iter().map(|header| owned(header.text)).collect();
        let names: Vec<CString> = HEADERS.iter().map(|header| owned(header.name)).collect();
        let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (texts_at, names_at) = (pointers(&texts), pointers(&names));
        let mut raw: RawProgram = std::ptr::null_mut();
        // SAFETY: the function copies the strings and writes one handle.
        let created = unsafe {
            (self.create_program)(
                &mut raw,
                text.as_ptr(),
                name.as_ptr(),
                count(texts_at.len()),
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        self.check(created, "nvrtcCreateProgram")?;
        Ok(Program { nvrtc: self, raw })
    }

    fn bytes(
        &self,
        program: &Program<'_>,
        get_size: GetSize,
        get: GetBytes,
        call: &str,
    ) -> Result<Vec<u8>, String> {
        let mut size = 0;
        // SAFETY: the program is live; the function writes one size.
        self.check(unsafe { get_size(program.raw, &mut size) }, call)?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the function writes as many bytes as it has just announced.
        self.check(unsafe { get(program.raw, bytes.as_mut_ptr().cast()) }, call)?;
        Ok(bytes)
    }
}

/// Lengths of our own small lists.
fn count(len: usize) -> c_int {
    c_int::try_from(len).unwrap_or(c_int::MAX)
}
