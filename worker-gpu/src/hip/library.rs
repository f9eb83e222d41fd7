//! Opening a driver's shared library.

use super::HipError;
use libloading::Library;
use std::ffi::c_void;
use std::ptr::NonNull;

/// How a provider's library is found.
pub(super) struct Soname {
    /// Name of the provider, for messages.
    pub provider: &'static str,
    /// File names, best first.
    pub names: &'static [&'static str],
    /// What to install when none loads.
    pub advice: &'static str,
}

/// An open library that stays open until the process ends: its functions may be called by destructors at any time, and
/// GPU drivers do not survive being unloaded.
pub(super) struct OpenLibrary {
    library: &'static Library,
    name: String,
}

impl Soname {
    /// Opens the first name that loads.
    pub fn open(&self) -> Result<OpenLibrary, HipError> {
        let mut reason = String::new();
        for name in self.names {
            // SAFETY: loading a driver runs its initialisers; that is what the user asked for by choosing the provider.
            match unsafe { Library::new(*name) } {
                Ok(library) => {
                    return Ok(OpenLibrary {
                        library: Box::leak(Box::new(library)),
                        name: (*name).to_owned(),
                    });
                }
                Err(error) if reason.is_empty() => reason = root_cause(&error),
                Err(_) => {}
            }
        }
        Err(HipError::LibraryMissing {
            provider: self.provider,
            tried: self.names.iter().map(|name| (*name).to_owned()).collect(),
            reason,
            advice: self.advice,
        })
    }
}

fn root_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), root_cause)
}

impl OpenLibrary {
    /// The file name that loaded.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address of a function, if the library has it.
    pub fn find(&self, symbol: &str) -> Option<NonNull<c_void>> {
        // SAFETY: only the address is taken; the caller gives it its type.
        let found = unsafe { self.library.get::<*mut c_void>(symbol.as_bytes()) };
        found.ok().and_then(|symbol| NonNull::new(*symbol))
    }
}
