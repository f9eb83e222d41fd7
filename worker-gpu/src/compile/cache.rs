//! Compiled objects on disk.
//!
//! A file's name says what it is made of: `<source>.<arch>.<content>.<compiler>.object`, where `content` hashes sources and
//! architecture, and `compiler` the compiler with its version and flags. Files appear whole (written aside, then renamed),
//! so several processes may share the folder.

use super::{Arch, CompileError};
use sha2::{Digest, Sha256};
use spillway_kernels::hip::{DeviceSource, HEADERS};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::SystemTime;

const ENDING: &str = ".object";

/// What an object is made of.
#[derive(Debug)]
pub(super) struct Key {
    stem: String,
}

impl Key {
    pub fn new(source: &DeviceSource<'_>, arch: &Arch) -> Self {
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update(text.len().to_le_bytes());
            hash.update(text.as_bytes());
        };
        for header in HEADERS {
            add(header.name);
            add(header.text);
        }
        add(source.text);
        Self { stem: format!("{}.{arch}.{}", source.name, hex(&hash.finalize()[..16])) }
    }
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// One object in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedObject {
    /// Name of its source.
    pub source: String,
    /// Its architecture.
    pub arch: Arch,
    /// Size in bytes.
    pub bytes: u64,
    /// True when it was made from the sources of this program; others are left from other versions.
    pub current: bool,
    /// The file.
    pub path: PathBuf,
}

/// The folder of objects.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The object that one compiler made.
    pub fn find(&self, key: &Key, compiler: &str) -> Option<Vec<u8>> {
        std::fs::read(self.path(key, compiler)).ok().filter(|image| !image.is_empty())
    }

    /// The newest object that any compiler made.
    pub fn find_any(&self, key: &Key) -> Option<Vec<u8>> {
        let prefix = format!("{}.", key.stem);
        let entries = std::fs::read_dir(&self.folder).ok()?.filter_map(Result::ok);
        let matching = entries.filter(|entry| {
            let name = entry.file_name();
            name.to_str().is_some_and(|name| name.starts_with(&prefix) && name.ends_with(ENDING))
        });
        let modified = |entry: &std::fs::DirEntry| {
            entry.metadata().and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
        };
        std::fs::read(matching.max_by_key(modified)?.path()).ok().filter(|image| !image.is_empty())
    }

    /// Keeps an object.
    pub fn store(&self, key: &Key, compiler: &str, image: &[u8]) -> Result<(), CompileError> {
        let path = self.path(key, compiler);
        let store = || -> std::io::Result<()> {
            std::fs::create_dir_all(&self.folder)?;
            let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
            file.write_all(image)?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|failed| failed.error)?;
            Ok(())
        };
        store().map_err(|error| CompileError::io("writing the kernel cache", &path, &error))
    }

    /// Everything in the folder that is an object.
    pub fn list(&self) -> Result<Vec<CachedObject>, CompileError> {
        let failed =
            |error: std::io::Error| CompileError::io("reading the kernel cache", &self.folder, &error);
        let entries = match std::fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut objects = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            if let Some(object) = entry.file_name().to_str().and_then(read_name) {
                let (source, arch, current) = object;
                let bytes = entry.metadata().map_err(failed)?.len();
                objects.push(CachedObject { source, arch, bytes, current, path: entry.path() });
            }
        }
        objects.sort_by(|a, b| (&a.source, &a.arch, &a.path).cmp(&(&b.source, &b.arch, &b.path)));
        Ok(objects)
    }

    /// Removes all objects; other files stay. Returns the number of bytes.
    pub fn clean(&self) -> Result<u64, CompileError> {
        let mut bytes = 0;
        for object in self.list()? {
            std::fs::remove_file(&object.path)
                .map_err(|error| CompileError::io("cleaning the kernel cache", &object.path, &error))?;
            bytes += object.bytes;
        }
        Ok(bytes)
    }

    fn path(&self, key: &Key, compiler: &str) -> PathBuf {
        self.folder.join(format!("{}.{compiler}{ENDING}", key.stem))
    }
}

/// Source, architecture and whether it is current, of a file that is an object.
fn read_name(name: &str) -> Option<(String, Arch, bool)> {
    let mut parts = name.strip_suffix(ENDING)?.split('.');
    let (source, arch, content, _compiler) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let arch: Arch = arch.parse().ok()?;
    let stem = format!("{source}.{arch}.{content}");
    let current =
        spillway_kernels::hip::source(source).is_some_and(|source| Key::new(source, &arch).stem == stem);
    parts.next().is_none().then(|| (source.to_owned(), arch, current))
}
