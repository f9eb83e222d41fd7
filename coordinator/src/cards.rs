//! Locks on GPUs, so that two coordinators do not plan for the same memory. A card is a file; whoever serves from the card
//! holds a lock on the file, which the system gives up when the process ends, however it ends.
//!
//! Taken after planning and before anything is started. A load that replaces a model on the same cards goes on with the locks
//! that are held.

use spillway_protocol::plan::{Execution, GpuDevice, Plan};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use thiserror::Error;

/// Environment variable with the folder of the lock files.
const FOLDER_ENV: &str = "SPILLWAY_LOCK_DIR";

/// A card that cannot be had.
#[derive(Debug, Error)]
pub enum LockError {
    /// Another process has it, or this one in another way.
    #[error(
        "device {index} ({name}) is in use by {holder}; wait for its end, name another device, or give \
         --allow-shared-device (allow_shared_device) to both"
    )]
    Busy {
        /// Number of the device.
        index: usize,
        /// Its name.
        name: String,
        /// Who has it.
        holder: String,
    },
    /// The lock file cannot be used.
    #[error("the lock file {} of a device cannot be used: {source}; set {FOLDER_ENV} to a folder that can be written", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// There is no folder for lock files.
    #[error(
        "there is no folder for the lock files of devices: none of {FOLDER_ENV}, XDG_RUNTIME_DIR, XDG_CACHE_HOME and HOME is set"
    )]
    NoFolder,
}

impl LockError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            LockError::Busy { .. } => "device_busy",
            LockError::File { .. } | LockError::NoFolder => "device_lock_failed",
        }
    }
}

/// Cards that are locked for as long as this or a clone lives.
#[derive(Debug, Clone, Default)]
pub struct CardLocks {
    _held: Vec<Arc<File>>,
}

/// How a card is locked: by its file, and whether others that allow it may lock it, too.
type Key = (PathBuf, bool);

/// What this process holds: the system does not let one process lock a file twice through two descriptors.
static HELD: Mutex<BTreeMap<Key, Weak<File>>> = Mutex::new(BTreeMap::new());

impl CardLocks {
    /// Locks the cards of `plan`; `share` lets other processes lock them that allow it, too.
    ///
    /// # Errors
    /// A card is in use, or lock files cannot be used. Nothing stays locked then.
    pub fn take(plan: &Plan, share: bool) -> Result<CardLocks, LockError> {
        let mut held = Vec::new();
        for stage in &plan.stages {
            if let Execution::Gpu { device } = &stage.execution {
                held.extend(lock(device, share)?);
            }
        }
        Ok(CardLocks { _held: held })
    }

    /// Locks one card for this process alone.
    ///
    /// # Errors
    /// As for [`CardLocks::take`].
    pub fn take_alone(device: &GpuDevice) -> Result<CardLocks, LockError> {
        Ok(CardLocks { _held: lock(device, false)?.into_iter().collect() })
    }
}

fn lock(device: &GpuDevice, share: bool) -> Result<Option<Arc<File>>, LockError> {
    let Some(name) = file_name(device) else { return Ok(None) };
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let folder = folder(|name| set(name).map(PathBuf::from))?;
    take(device, (folder.join(name), share)).map(Some)
}

/// Name of a card's file; none for emulated devices without an id, which every process has for itself.
fn file_name(device: &GpuDevice) -> Option<String> {
    match &device.uuid {
        Some(uuid) => Some(format!("gpu-{uuid}.lock")),
        None if device.provider.starts_with("emulated") => None,
        None => Some(format!("gpu-pci-{}.lock", device.pci)),
    }
}

/// The folder that the environment names, or the user's.
fn folder(env: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf, LockError> {
    let home = || Some(env("HOME")?.join(".cache"));
    let of_user = || env("XDG_RUNTIME_DIR").or_else(|| env("XDG_CACHE_HOME")).or_else(home);
    env(FOLDER_ENV).or_else(|| Some(of_user()?.join("spillway/locks"))).ok_or(LockError::NoFolder)
}

fn take(device: &GpuDevice, key: Key) -> Result<Arc<File>, LockError> {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(lock) = held.get(&key).and_then(Weak::upgrade) {
        return Ok(lock);
    }
    let failed = |source| LockError::File { path: key.0.clone(), source };
    let mut file = open(&key.0).map_err(failed)?;
    let taken = if key.1 { file.try_lock_shared() } else { file.try_lock() };
    match taken {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let (index, name) = (device.index, device.name.clone());
            return Err(LockError::Busy { index, name, holder: holder(&mut file) });
        }
        Err(TryLockError::Error(source)) => return Err(failed(source)),
    }
    note_holder(&mut file).map_err(failed)?;
    let lock = Arc::new(file);
    held.insert(key, Arc::downgrade(&lock));
    Ok(lock)
}

fn open(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    // What is in it is the holder's process id, which must stay readable until the lock is had.
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

fn note_holder(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

/// Who has a lock, as far as its file says.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let pid = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse::<u32>().ok());
    match pid {
        Some(pid) if pid == std::process::id() => {
            "this process, shared in another way; unload first".to_owned()
        }
        Some(pid) => format!("process {pid}"),
        None => "another process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(provider: &str, uuid: Option<&str>) -> GpuDevice {
        GpuDevice {
            index: 3,
            provider: provider.into(),
            ordinal: 0,
            name: "Some GPU".into(),
            arch: "gfx1100".into(),
            pci: "0000:03:00.0".into(),
            uuid: uuid.map(str::to_owned),
            driver: 1,
        }
    }

    #[test]
    fn a_card_is_known_by_its_id_or_its_place() {
        let name = |provider, uuid| file_name(&device(provider, uuid));
        assert_eq!(name("amd", Some("12ab")).as_deref(), Some("gpu-12ab.lock"));
        assert_eq!(name("amd", None).as_deref(), Some("gpu-pci-0000:03:00.0.lock"));
        assert_eq!(name("emulated:devices=1", None), None);
        assert!(name("emulated:ids=1", Some("01")).is_some());
    }

    #[test]
    fn the_folder_is_the_users_unless_the_environment_says_otherwise() {
        let with = |set: &[(&str, &str)]| {
            let set: BTreeMap<String, PathBuf> =
                set.iter().map(|(name, value)| ((*name).to_owned(), PathBuf::from(value))).collect();
            folder(move |name| set.get(name).cloned()).map_err(|error| error.code())
        };
        let all = [
            ("SPILLWAY_LOCK_DIR", "/l"),
            ("XDG_RUNTIME_DIR", "/r"),
            ("XDG_CACHE_HOME", "/c"),
            ("HOME", "/h"),
        ];
        assert_eq!(with(&all), Ok("/l".into()));
        assert_eq!(with(&all[1..]), Ok("/r/spillway/locks".into()));
        assert_eq!(with(&all[2..]), Ok("/c/spillway/locks".into()));
        assert_eq!(with(&all[3..]), Ok("/h/.cache/spillway/locks".into()));
        assert_eq!(with(&[]), Err("device_lock_failed"));
    }

    #[test]
    fn a_lock_lasts_as_long_as_someone_holds_it_and_is_the_same_for_the_whole_process() {
        let folder = tempfile::tempdir().unwrap();
        let key = |share| (folder.path().join("locks/card.lock"), share);
        let card = device("amd", None);
        let first = take(&card, key(false)).unwrap();
        let second = take(&card, key(false)).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        let busy = take(&card, key(true)).unwrap_err();
        assert!(busy.code() == "device_busy" && busy.to_string().contains("device 3 (Some GPU)"), "{busy}");
        drop((first, second));
        let shared = take(&card, key(true)).unwrap();
        // As another process would see it.
        let other = open(&key(true).0).unwrap();
        other.try_lock_shared().unwrap();
        drop(shared);
        assert!(take(&card, key(false)).is_err(), "another one still shares it");
        drop(other);
        assert!(take(&card, key(false)).is_ok());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_told() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let error = take(&device("amd", None), (folder.path().join("file/card.lock"), false)).unwrap_err();
        assert_eq!(error.code(), "device_lock_failed");
    }
}
