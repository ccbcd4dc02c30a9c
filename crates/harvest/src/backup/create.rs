//! Makes a backup of a home that may be in use. The file gets its name when it is complete: a kill
//! or a full disk leaves no half backup, at most files with the suffixes below.
//!
//! The order keeps the parts consistent. No layer is removed meanwhile; the snapshots are listed
//! before and after the database is copied, so that those it refers to are in the archive; forge
//! and artifacts come after the database, which names only what they already have.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

use anyhow::{Context, Result, bail};
use flate2::{Compression, write::GzEncoder};
use harvest_engine::DiskBackup;
use harvest_images::{PackError, TreeArchive};
use harvest_proto::Timestamp;
use ring::digest;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::Serialize;

use super::{ABOUT, About, FILES, FOLDERS, FORMAT, IMAGE_LAYERS, SETTINGS};
use crate::{
    Invocation,
    cli::units::bytes,
    config::{self, process_env},
    database,
    printer::{Advice, Printer, count},
    server_process,
};

/// Appended to the backup's name while it is written.
const PARTIAL: &str = ".partial";

/// Appended to the backup's name for the copy of the database.
const DATABASE: &str = ".partial.db";

/// What to leave out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    pub(crate) snapshots: bool,
    pub(crate) images: bool,
}

/// A complete backup.
#[derive(Debug, Serialize)]
pub(crate) struct Created {
    pub(crate) file: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
    #[serde(flatten)]
    pub(crate) about: About,
    /// Sandboxes of sessions that ran: what they wrote since their last snapshot is not saved.
    pub(crate) running: usize,
    /// Layers that snapshots refer to and that are gone.
    pub(crate) missing_layers: usize,
    /// Sockets, and names and attributes too long for a tar.
    pub(crate) left_out: u64,
}

/// `harvest-2026-01-31T235959Z.tar.gz`.
pub(crate) fn default_name(now: Timestamp) -> PathBuf {
    let time = now.to_string();
    let seconds = time.split('.').next().unwrap_or_default().replace(':', "");
    format!("harvest-{seconds}Z.tar.gz").into()
}

pub(crate) async fn create(ctx: &Invocation, file: &Path, parts: Parts) -> Result<Created> {
    let config = &ctx.config;
    let database = database::file(config)?;
    if file.exists() {
        let hint = "name another file, or remove this one";
        bail!(Advice::new(format!("{} exists already", file.display()), hint));
    }
    let engine = server_process::open_engine(config)?;
    let running = engine.running_session_sandboxes().context("cannot list the sandboxes")?;
    let mut disks = engine.disk_backup().context("cannot lock the disks")?;
    if parts.snapshots {
        disks.read_snapshots().context("cannot list the snapshots")?;
    }
    ctx.print.live("Copying the database", None);
    let draft = Draft::create(file)?;
    let schema = harvest_store::copy_database(&database, &draft.database)
        .await
        .with_context(|| format!("cannot copy {}", database.display()))?;
    if parts.snapshots {
        disks.read_snapshots().context("cannot list the snapshots")?;
    }
    let (mut layers, missing) = disks.layers();
    layers.retain(|layer| parts.images || !layer.of_image);
    let records = disks.snapshot_files().context("cannot read the snapshots")?;
    let about = About {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        schema,
        created_at: SystemTime::now().into(),
        home: config.home.display().to_string(),
        snapshots: records.len(),
        layers: layers.len(),
    };
    let mut archive = draft.archive(ctx.print)?;
    archive.add_bytes(ABOUT, &serde_json::to_vec(&about)?)?;
    archive.add_file(database::OWN_FILE, &draft.database)?;
    if let Some(settings) = config::existing_file(&ctx.flags, &process_env) {
        archive.add_file(SETTINGS, &settings)?;
    }
    for name in FILES {
        archive.add_file(name, &config.home.join(name))?;
    }
    for name in FOLDERS {
        let files = files_of(&config.home.join(name))?;
        for path in files {
            let member = format!("{name}/{path}");
            match path.ends_with('/') {
                true => archive.add_folder(member.trim_end_matches('/'))?,
                false => archive.add_file(&member, &config.home.join(&member)).map(drop)?,
            }
        }
    }
    for (name, record) in &records {
        archive.add_bytes(&format!("snapshots/{name}"), record)?;
    }
    for layer in &layers {
        let folder = if layer.of_image { IMAGE_LAYERS } else { "layers" };
        archive.add_tree(&format!("{folder}/{}", layer.id.as_str()), &layer.path)?;
    }
    let left_out = archive.left_out();
    let (bytes, sha256) = draft.finish(archive, file)?;
    ctx.print.end_live();
    drop::<DiskBackup<'_>>(disks);
    let file = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let missing_layers = missing.len();
    Ok(Created { file, bytes, sha256, about, running, missing_layers, left_out })
}

/// The paths of everything below a folder, those of folders with a `/` at the end. Git's objects
/// come last: references that were read before point to objects that are there.
fn files_of(folder: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(below) = folders.pop() {
        let path = folder.join(&below);
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.with_context(|| format!("cannot list {}", path.display()))?,
        };
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", path.display()))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if below.is_empty() { name } else { format!("{below}/{name}") };
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => {
                    files.push(format!("{path}/"));
                    folders.push(path);
                }
                Ok(kind) if kind.is_file() && !is_transient(&path) => files.push(path),
                _ => {}
            }
        }
    }
    files.sort_by_key(|path| (path.contains("/objects/"), path.clone()));
    Ok(files)
}

/// Whether a file of a repository exists only while git writes: locks and temporary objects.
fn is_transient(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    let temporary = name.starts_with("tmp_") || path.contains("/tmp_objdir-");
    path.contains("repository.git/") && (name.ends_with(".lock") || temporary)
}

/// The files of a backup that is being made; removed unless it is completed.
struct Draft {
    partial: PathBuf,
    database: PathBuf,
}

type Archive = TreeArchive<Progress>;

impl Draft {
    fn create(file: &Path) -> Result<Self> {
        let named = |suffix: &str| {
            let mut name = OsString::from(file);
            name.push(suffix);
            PathBuf::from(name)
        };
        let draft = Self { partial: named(PARTIAL), database: named(DATABASE) };
        for path in [&draft.partial, &draft.database] {
            // Left by a backup that was killed.
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", path.display()));
                }
                _ => {}
            }
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            made.with_context(|| format!("cannot create {}", path.display()))?;
        }
        Ok(draft)
    }

    fn archive(&self, print: Printer) -> Result<Archive> {
        let opened = OpenOptions::new().write(true).open(&self.partial);
        let file = opened.with_context(|| format!("cannot open {}", self.partial.display()))?;
        let sha256 = digest::Context::new(&digest::SHA256);
        let output = BufWriter::new(Output { file, sha256, bytes: 0 });
        let gzip = GzEncoder::new(output, Compression::fast());
        Ok(TreeArchive::new(Progress { gzip, bytes: 0, shown: 0, began: Instant::now(), print }))
    }

    /// Gives the complete archive its name. Returns its size and hash.
    fn finish(self, archive: Archive, file: &Path) -> Result<(u64, String)> {
        let progress = archive.finish()?;
        let write = || -> io::Result<Output> {
            let buffered = progress.gzip.finish()?;
            let output = buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
            output.file.sync_all()?;
            renameat_with(CWD, &self.partial, CWD, file, RenameFlags::NOREPLACE)?;
            File::open(folder_of(file))?.sync_all()?;
            Ok(output)
        };
        let output = write().with_context(|| format!("cannot write {}", file.display()))?;
        let hash = output.sha256.finish();
        let hash = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((output.bytes, hash))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        for path in [&self.partial, &self.database] {
            // After a successful rename there is no partial file.
            let _ = fs::remove_file(path);
        }
    }
}

pub(super) fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The file, with its size and hash so far.
struct Output {
    file: File,
    sha256: digest::Context,
    bytes: u64,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.sha256.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Shows how much was packed.
struct Progress {
    gzip: GzEncoder<BufWriter<Output>>,
    bytes: u64,
    shown: u64,
    began: Instant,
    print: Printer,
}

impl Write for Progress {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        let written = self.gzip.write(content)?;
        self.bytes += written as u64;
        if self.bytes - self.shown > 8_000_000 {
            self.shown = self.bytes;
            self.print.live(&format!("Packed {}", bytes(self.bytes)), Some(self.began.elapsed()));
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.gzip.flush()
    }
}

/// What the backup does not hold, for the user.
pub(crate) fn warnings(created: &Created) -> Vec<String> {
    let mut warnings = Vec::new();
    if created.running > 0 {
        let sandboxes = count(created.running as u64, "sandbox");
        warnings.push(format!(
            "{sandboxes} ran: what was written there since the last snapshot is not saved"
        ));
    }
    if created.missing_layers > 0 {
        let layers = count(created.missing_layers as u64, "layer");
        warnings.push(format!("{layers} of snapshots were gone already"));
    }
    if created.left_out > 0 {
        let names = count(created.left_out, "name");
        warnings.push(format!("{names} left out: sockets, and paths too long for a tar"));
    }
    warnings
}

/// The error of a full disk names the next command.
pub(crate) fn explain(error: anyhow::Error) -> anyhow::Error {
    let is_full = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref() {
        Some(error) => io::Error::kind(error) == io::ErrorKind::StorageFull,
        None => matches!(cause.downcast_ref(), Some(PackError::Write(source))
            if source.kind() == io::ErrorKind::StorageFull),
    };
    if !error.chain().any(is_full) {
        return error;
    }
    let hint = "name a file on another disk, or add --without-images or --without-snapshots";
    error.context(Advice::new("the disk is full; no backup was made", hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_name_is_the_time_in_utc() {
        let time = Timestamp::from_millis(1_763_196_705_123);
        assert_eq!(default_name(time), Path::new("harvest-2025-11-15T085145Z.tar.gz"));
    }

    #[test]
    fn references_come_before_git_objects() {
        let folder = tempfile::tempdir().unwrap();
        let git = folder.path().join("app/repository.git");
        for path in ["objects/aa", "refs/heads/a", "objects/pack"] {
            fs::create_dir_all(git.join(path)).unwrap();
        }
        for path in [
            "objects/aa/1",
            "objects/pack/tmp_pack_x",
            "refs/heads/a/b",
            "refs/heads/a/c.lock",
            "HEAD",
            "packed-refs",
        ] {
            fs::write(git.join(path), "").unwrap();
        }
        fs::write(folder.path().join("app/token"), "").unwrap();
        let files = files_of(folder.path()).unwrap();
        let names = files.iter().map(|path| path.rsplit('/').next().unwrap());
        let names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
        assert_eq!(names, ["HEAD", "packed-refs", "b", "token", "1"]);
        assert!(files.contains(&"app/repository.git/objects/pack/".to_owned()), "empty folders");
        assert_eq!(files_of(&folder.path().join("none")).unwrap(), [""; 0]);
    }

    #[test]
    fn abandoned_draft_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("b.tar.gz");
        fs::write(folder.path().join("b.tar.gz.partial"), "left by a kill").unwrap();
        drop(Draft::create(&file).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
