//! Reads, writes, describes and lists files for a connection. Bytes stream through: no file is ever
//! held whole. A file appears under its name complete or not at all.

mod shape;

use std::{
    ffi::OsStr,
    fs::{self, File, Metadata},
    io::{self, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use harvest_proto::{
    Timestamp,
    bridge::{
        Fault, FaultCode, FileKind, FileRequest, FileStat, FromSupervisor, MAX_CONTROL_BYTES, MAX_DATA_BYTES,
        Reply, RequestId, StreamId,
    },
};
use rustix::fs::OFlags;
use tokio::task::spawn_blocking;

use crate::{
    connection::Connection,
    log,
    streams::{Credit, Inbox},
    users::User,
};

/// Checks a request and carries it out beside everything else.
pub(crate) fn start(connection: &Rc<Connection>, id: RequestId, request: FileRequest) -> Result<(), Fault> {
    let (FileRequest::Read { path, .. }
    | FileRequest::Write { path, .. }
    | FileRequest::Stat { path }
    | FileRequest::List { path, .. }
    | FileRequest::Mkdir { path, .. }
    | FileRequest::Symlink { path, .. }
    | FileRequest::ReadLink { path }
    | FileRequest::Remove { path }) = &request
    else {
        return Err(Fault::new(FaultCode::Invalid, "this supervisor does not know that request"));
    };
    if !path.starts_with('/') || path.contains('\0') {
        return Err(Fault::new(FaultCode::Invalid, format!("`{path}` is not an absolute path")));
    }
    let path = PathBuf::from(path);
    let here = Rc::clone(connection);
    match request {
        FileRequest::Read { stream, .. } => {
            let credit = connection.sends(stream)?;
            connection.spawn(async move { read(&here, id, &path, stream, &credit).await });
        }
        FileRequest::Write { mode, user, stream, .. } => {
            let user = connection.supervisor.user(user.as_deref())?;
            let inbox = connection.receives(stream)?;
            connection.spawn(async move {
                let written = write(&here, &path, mode, user, stream, &inbox).await;
                here.forget(stream);
                here.reply(id, written.map(|()| Reply::Done).map_err(|error| fault(&path, &error))).await;
            });
        }
        FileRequest::Stat { .. } => connection.spawn(async move {
            let result =
                blocking(path, |path| fs::symlink_metadata(path).map(|data| stat(name(path), &data)));
            here.reply(id, result.await.map(Reply::Stat)).await;
        }),
        FileRequest::List { after, .. } => connection.spawn(async move {
            let result = blocking(path, move |path| list(path, after.as_deref()));
            here.reply(id, result.await.map(|(entries, more)| Reply::List { entries, more })).await;
        }),
        request => {
            let work = shape::work(&connection.supervisor, request)?;
            connection.spawn(async move { here.reply(id, blocking(path, work).await).await });
        }
    }
    Ok(())
}

async fn blocking<T: Send + 'static>(
    path: PathBuf,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, Fault> {
    let worked = spawn_blocking(move || work(&path).map_err(|error| fault(&path, &error))).await;
    worked.unwrap_or_else(|_| Err(Fault::new(FaultCode::System, "the file work was cut off")))
}

async fn read(connection: &Rc<Connection>, id: RequestId, path: &Path, stream: StreamId, credit: &Credit) {
    let file = match blocking(path.to_owned(), open_readable).await {
        Ok(file) => Arc::new(file),
        Err(fault) => {
            connection.forget(stream);
            return connection.reply(id, Err(fault)).await;
        }
    };
    // First, so that a dialer that waits for it before it reads on cannot wait for ever.
    connection.reply(id, Ok(Reply::Done)).await;
    let mut offset = 0u64;
    loop {
        let may = credit.available(MAX_DATA_BYTES).await;
        let same = Arc::clone(&file);
        let piece = spawn_blocking(move || {
            let mut buffer = vec![0u8; may];
            let count = same.read_at(&mut buffer, offset)?;
            buffer.truncate(count);
            Ok::<_, io::Error>(buffer)
        });
        match piece.await.unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into())) {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) => {
                credit.spend(bytes.len());
                offset += bytes.len() as u64;
                connection.data(stream, &bytes).await;
            }
            Err(error) => {
                // An end here would pass for the file's own.
                log::line(format_args!("cannot read on a file: {error}"));
                return connection.broken.notify_one();
            }
        }
    }
    connection.end(stream).await;
}

/// Opens a regular file to read. Without waiting: opening a pipe would block until somebody writes.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Opens a regular file of which a first byte, if there is one, can be read: some in `/proc` open and then
/// refuse, which is better said than shown by hanging up.
fn open_readable(path: &Path) -> io::Result<File> {
    let file = open_regular(path)?;
    file.read_at(&mut [0u8; 1], 0)?;
    Ok(file)
}

async fn write(
    connection: &Rc<Connection>,
    path: &Path,
    mode: u32,
    user: User,
    stream: StreamId,
    inbox: &Inbox,
) -> io::Result<()> {
    let target = path.to_owned();
    let unfinished = on_thread(move || Unfinished::new(&target, mode, &user)).await?;
    let unfinished = Arc::new(unfinished);
    while let Some(bytes) = inbox.take().await {
        let (same, length) = (Arc::clone(&unfinished), bytes.len());
        on_thread(move || (&same.file).write_all(&bytes)).await?;
        let bytes = inbox.used(length);
        connection.say(FromSupervisor::Credit { stream, bytes }).await;
    }
    on_thread(move || unfinished.finish()).await
}

async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    spawn_blocking(work).await.unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into()))
}

/// A file being written beside its place; removed unless it is finished.
struct Unfinished {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
}

impl Unfinished {
    fn new(target: &Path, mode: u32, user: &User) -> io::Result<Self> {
        let missing = || io::Error::new(io::ErrorKind::InvalidInput, "not the path of a file");
        let (folder, name) = (target.parent().ok_or_else(missing)?, target.file_name().ok_or_else(missing)?);
        if target.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let temporary = folder.join(temporary_name(name));
        // Born without rights and without following a link: nobody inside sees half a file.
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let unfinished = Self { file, temporary, target: target.to_owned() };
        let (uid, gid) = (rustix::fs::Uid::from_raw(user.uid), rustix::fs::Gid::from_raw(user.gid));
        rustix::fs::fchown(&unfinished.file, Some(uid), Some(gid))?;
        // After the owner, which clears the set-id bits.
        unfinished.file.set_permissions(fs::Permissions::from_mode(mode & 0o7777))?;
        Ok(unfinished)
    }

    fn finish(&self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.temporary, &self.target)?;
        let folder = self.target.parent().unwrap_or(Path::new("/"));
        File::open(folder)?.sync_all()
    }
}

impl Drop for Unfinished {
    // Harmless after `finish`: the name is no longer there.
    fn drop(&mut self) {
        let _already_renamed = fs::remove_file(&self.temporary);
    }
}

fn temporary_name(name: &OsStr) -> String {
    // Cut: the whole must stay below the 255 bytes a name may have. An id of ours is as random as
    // a name needs to be.
    let name = name.to_string_lossy();
    format!(".{}.{}.part", crate::cut::head(&name, 100), harvest_proto::SandboxId::random().part())
}

/// The entries by name, and whether there are more than fit a reply; who cannot ask for those is told so.
fn list(path: &Path, after: Option<&str>) -> io::Result<(Vec<FileStat>, bool)> {
    // About what an entry takes beside its name, as JSON.
    const ENTRY_BYTES: usize = 160;
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    let mut entries = Vec::new();
    let mut bytes = 0;
    for name in names.into_iter().filter(|name| after.is_none_or(|after| name.as_str() > after)) {
        let Ok(metadata) = fs::symlink_metadata(path.join(&name)) else { continue };
        bytes += ENTRY_BYTES + name.len() * 2;
        if bytes > MAX_CONTROL_BYTES {
            let words = "the folder has more entries than fit a reply";
            let unasked = || io::Error::new(io::ErrorKind::InvalidInput, words);
            return after.map(|_| (entries, true)).ok_or_else(unasked);
        }
        entries.push(stat(name, &metadata));
    }
    Ok((entries, false))
}

fn name(path: &Path) -> String {
    path.file_name().map_or_else(|| "/".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn stat(name: String, metadata: &Metadata) -> FileStat {
    let kind = match metadata.file_type() {
        kind if kind.is_file() => FileKind::File,
        kind if kind.is_dir() => FileKind::Folder,
        kind if kind.is_symlink() => FileKind::Link,
        _ => FileKind::Other,
    };
    let modified = metadata.modified().map_or_else(|_| Timestamp::from_millis(0), Timestamp::from);
    FileStat {
        name,
        kind,
        size: metadata.len(),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        modified,
    }
}

fn fault(path: &Path, error: &io::Error) -> Fault {
    use io::ErrorKind as Kind;
    let code = match error.kind() {
        Kind::NotFound | Kind::NotADirectory => FaultCode::NotFound,
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => FaultCode::Denied,
        Kind::InvalidInput | Kind::IsADirectory | Kind::InvalidFilename => FaultCode::Invalid,
        _ => FaultCode::System,
    };
    Fault::new(code, format!("{}: {error}", path.display()))
}
