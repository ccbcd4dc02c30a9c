//! Reads, writes, stats and lists files for a connection, with the access of the request's user.
//! Files are streamed, never held in memory, and written atomically.

mod tree;

use std::{
    ffi::OsStr,
    fs::{self, File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use harvest_proto::{
    Timestamp,
    bridge::{
        Fault, FaultCode, FileKind, FileRequest, FileStat, FromSupervisor, MAX_CONTROL_BYTES,
        MAX_DATA_BYTES, Reply, RequestId, StreamId,
    },
};
use rustix::{fs::OFlags, io::Errno};
use tokio::task::spawn_blocking;

use crate::{
    connection::Connection,
    log,
    resolve::{self, ResolvedPath},
    streams::{Credit, Inbox},
    truncate,
    users::User,
};

// Bounds memory: files of agents' state have a few hundred KiB.
const MAX_SMALL_BYTES: u64 = 4 * 1024 * 1024;

/// Checks a request and runs it as a task of the connection.
pub(crate) fn start(
    connection: &Rc<Connection>,
    id: RequestId,
    user: Option<&str>,
    request: FileRequest,
) -> Result<(), Fault> {
    let (FileRequest::Read { path, .. }
    | FileRequest::Write { path, .. }
    | FileRequest::Stat { path, .. }
    | FileRequest::List { path, .. }
    | FileRequest::Mkdir { path, .. }
    | FileRequest::Symlink { path, .. }
    | FileRequest::Remove { path, .. }) = &request;
    let user = connection.sandbox.user(user)?;
    let absolute = match path.strip_prefix("~/") {
        Some(rest) => format!("{}/{rest}", connection.sandbox.home(&user)),
        None => path.clone(),
    };
    if !absolute.starts_with('/') || absolute.contains('\0') {
        return Err(Fault::invalid(format!("`{path}` is not an absolute path")));
    }
    let target = Target { path: PathBuf::from(absolute), user };
    let shared = Rc::clone(connection);
    match request {
        FileRequest::Read { stream, .. } => {
            let credit = connection.open_outgoing(stream)?;
            let cancelled = connection.register_kill(id);
            connection.spawn(async move {
                tokio::select! {
                    () = read(&shared, id, target, stream, &credit) => {}
                    () = cancelled.notified() => shared.forget(stream),
                }
                shared.unregister_kill(id);
            });
        }
        FileRequest::Write { mode, stream, .. } => {
            let inbox = connection.open_incoming(stream)?;
            let cancelled = connection.register_kill(id);
            connection.spawn(async move {
                let path = target.path.clone();
                let written = tokio::select! {
                    written = write(&shared, target, mode, stream, &inbox) => written,
                    // Dropping the write removes the partial file.
                    () = cancelled.notified() => Err(io::ErrorKind::Interrupted.into()),
                };
                shared.unregister_kill(id);
                shared.forget(stream);
                shared
                    .reply(id, written.map(|()| Reply::Done).map_err(|error| fault(&path, &error)))
                    .await;
            });
        }
        request => {
            let operation = operation(request);
            connection
                .spawn(async move { shared.reply(id, blocking(target, operation).await).await });
        }
    }
    Ok(())
}

/// A path, and the user whose access applies to it.
struct Target {
    path: PathBuf,
    user: User,
}

/// A blocking operation on a path.
type FileOperation = Box<dyn FnOnce(&Path) -> io::Result<Reply> + Send>;

/// The operation of a request without a stream.
fn operation(request: FileRequest) -> FileOperation {
    match request {
        FileRequest::Stat { follow, .. } => {
            Box::new(move |path| describe(path, follow).map(Reply::Stat))
        }
        FileRequest::List { after, .. } => Box::new(move |path| {
            let (entries, more) = list(path, after.as_deref())?;
            Ok(Reply::List { entries, more })
        }),
        FileRequest::Mkdir { mode, .. } => Box::new(move |path| tree::make_folder(path, mode)),
        FileRequest::Symlink { target, .. } => Box::new(move |path| tree::make_link(path, &target)),
        FileRequest::Remove { tree, .. } => Box::new(move |path| tree::remove(path, tree)),
        FileRequest::Read { .. } | FileRequest::Write { .. } => unreachable!("has a stream"),
    }
}

async fn blocking<T: Send + 'static>(
    Target { path, user }: Target,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, Fault> {
    let same = path.clone();
    let done = blocking_io(move || user.access(|| work(&same))).await;
    done.map_err(|error| fault(&path, &error))
}

async fn read(
    connection: &Rc<Connection>,
    id: RequestId,
    target: Target,
    stream: StreamId,
    credit: &Credit,
) {
    let file = match blocking(target, open_readable).await {
        Ok(file) => Arc::new(file),
        Err(fault) => {
            connection.forget(stream);
            return connection.reply(id, Err(fault)).await;
        }
    };
    // Reply before the data: a client may wait for the reply before it grants more credit.
    connection.reply(id, Ok(Reply::Done)).await;
    let mut offset = 0u64;
    loop {
        let allowed = credit.available(MAX_DATA_BYTES).await;
        let same = Arc::clone(&file);
        let chunk = blocking_io(move || {
            let mut buffer = vec![0u8; allowed];
            let count = same.read_at(&mut buffer, offset)?;
            buffer.truncate(count);
            Ok(buffer)
        });
        match chunk.await {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) => {
                credit.spend(bytes.len());
                offset += bytes.len() as u64;
                connection.data(stream, &bytes).await;
            }
            Err(error) => {
                // Ending the stream would look like the end of the file.
                log::line(format_args!("cannot continue reading a file: {error}"));
                return connection.broken.notify_one();
            }
        }
    }
    connection.end(stream).await;
}

/// Opens a regular file and reads a byte: some files in `/proc` can be opened but not read, which
/// should be an error reply instead of a broken connection.
fn open_readable(path: &Path) -> io::Result<File> {
    let file = resolve::open_regular(path)?;
    file.read_at(&mut [0u8; 1], 0)?;
    Ok(file)
}

async fn write(
    connection: &Rc<Connection>,
    target: Target,
    mode: u32,
    stream: StreamId,
    inbox: &Inbox,
) -> io::Result<()> {
    let partial = blocking_io(move || PartialFile::new(target, mode)).await?;
    let partial = Arc::new(partial);
    while let Some(bytes) = inbox.take().await {
        let (same, length) = (Arc::clone(&partial), bytes.len());
        blocking_io(move || (&same.file).write_all(&bytes)).await?;
        let bytes = inbox.grant_back(length);
        connection.send(FromSupervisor::Credit { stream, bytes }).await;
    }
    blocking_io(move || partial.finish()).await
}

/// Runs blocking work on another thread.
pub(crate) async fn blocking_io<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    spawn_blocking(work).await.unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into()))
}

/// The text of a file, with the access of this user; `None` if there is no such file.
pub(crate) fn read_small(path: &Path, user: &User) -> io::Result<Option<String>> {
    let read = user.access(|| {
        let mut text = String::new();
        resolve::open_regular(path)?.take(MAX_SMALL_BYTES + 1).read_to_string(&mut text)?;
        Ok(text)
    });
    match read {
        Ok(text) if text.len() as u64 > MAX_SMALL_BYTES => Err(io::ErrorKind::FileTooLarge.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// Replaces a file, with the access of this user. Nothing waits for the disk.
pub(crate) fn write_small(path: &Path, user: &User, text: &str) -> io::Result<()> {
    let target = Target { path: path.to_owned(), user: user.clone() };
    let partial = PartialFile::new(target, 0o600)?;
    (&partial.file).write_all(text.as_bytes())?;
    partial.rename()
}

/// A temporary file next to its target; removed unless it is finished.
struct PartialFile {
    file: File,
    temporary: PathBuf,
    target: ResolvedPath,
    user: User,
}

impl PartialFile {
    fn new(Target { path, user }: Target, mode: u32) -> io::Result<Self> {
        let create = || {
            let target = ResolvedPath::of(&path)?;
            if target.path().is_dir() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            let temporary = target.sibling(&temporary_name(path.file_name().unwrap_or_default()));
            // Private and without following links: other users cannot see a partial file.
            let file =
                fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
            Ok((file, temporary, target))
        };
        let (file, temporary, target) = user.access(create)?;
        let partial = Self { file, temporary, target, user };
        tree::set_mode(&partial.file, mode)?;
        Ok(partial)
    }

    fn finish(&self) -> io::Result<()> {
        self.file.sync_all()?;
        self.rename()?;
        self.target.sync()
    }

    fn rename(&self) -> io::Result<()> {
        self.user.access(|| fs::rename(&self.temporary, self.target.path()))
    }
}

impl Drop for PartialFile {
    // Harmless after `finish`: the file has been renamed.
    fn drop(&mut self) {
        let _already_renamed = self.user.access(|| fs::remove_file(&self.temporary));
    }
}

fn temporary_name(name: &OsStr) -> String {
    // Truncated to stay below the limit of 255 bytes. An id is random enough.
    let name = name.to_string_lossy();
    format!(".{}.{}.part", truncate::head(&name, 100), harvest_proto::SandboxId::random().part())
}

/// The entries ordered by name, and whether more exist than fit into a reply. Without `after`,
/// which would allow paging, that is an error.
fn list(path: &Path, after: Option<&str>) -> io::Result<(Vec<FileStat>, bool)> {
    // Overhead of the frame.
    const FRAME_BYTES: usize = 4 * 1024;
    // Held open while it is listed: the path may point elsewhere a moment later.
    let folder = resolve::open(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    let path = resolve::fd_path(&folder);
    let mut names = Vec::new();
    for entry in fs::read_dir(&path)? {
        let name = entry?.file_name();
        names.push((name.to_string_lossy().into_owned(), name));
    }
    names.sort_unstable();
    let mut entries = Vec::new();
    let mut bytes = FRAME_BYTES;
    let wanted = |name: &str| after.is_none_or(|after| name > after);
    for (shown, name) in names.into_iter().filter(|(shown, _)| wanted(shown)) {
        let Ok(metadata) = fs::symlink_metadata(path.join(&name)) else { continue };
        let target = metadata.is_symlink().then(|| target(&path.join(&name))).flatten();
        let mut entry = FileStat { target, ..stat(shown, &metadata) };
        if name.to_str().is_none() {
            entry.kind = FileKind::NotUtf8;
        }
        // The length as JSON with a comma: escaping may turn one byte into six.
        bytes += truncate::json_len(&entry) + 1;
        if bytes > MAX_CONTROL_BYTES {
            let message = "the folder has more entries than fit into a reply";
            let too_many = || io::Error::new(io::ErrorKind::InvalidInput, message);
            return after.map(|_| (entries, true)).ok_or_else(too_many);
        }
        entries.push(entry);
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
        target: None,
    }
}

fn target(link: &Path) -> Option<String> {
    fs::read_link(link).ok()?.into_os_string().into_string().ok()
}

/// The metadata of a path; with `follow`, of a link's target.
fn describe(path: &Path, follow: bool) -> io::Result<FileStat> {
    if follow || path.file_name().is_none() {
        let opened = resolve::open(path, OFlags::PATH)?;
        return Ok(stat(name(path), &opened.metadata()?));
    }
    let resolved = ResolvedPath::of(path)?;
    let metadata = fs::symlink_metadata(resolved.path())?;
    let target = metadata.is_symlink().then(|| target(resolved.path())).flatten();
    Ok(FileStat { target, ..stat(name(path), &metadata) })
}

fn fault(path: &Path, error: &io::Error) -> Fault {
    use io::ErrorKind as Kind;
    let code = match error.kind() {
        Kind::NotFound | Kind::NotADirectory => FaultCode::NotFound,
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => FaultCode::Denied,
        Kind::InvalidInput | Kind::IsADirectory | Kind::InvalidFilename | Kind::AlreadyExists => {
            FaultCode::Invalid
        }
        // Circular links, or links of the kernel (see `resolve`).
        _ if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => FaultCode::Denied,
        _ => FaultCode::System,
    };
    let full = matches!(error.kind(), Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge);
    Fault { full, ..Fault::new(code, format!("{}: {error}", path.display())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::bridge::Frame;

    #[test]
    fn hostile_names_are_listed_in_valid_frames() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..300 {
            let name = format!("{number:03}{}", "\u{1}".repeat(200));
            std::os::unix::fs::symlink("\u{1}".repeat(2000), folder.path().join(name)).unwrap();
        }
        let (mut after, mut listed) = (String::new(), 0);
        loop {
            let (entries, more) = list(folder.path(), Some(&after)).unwrap();
            after = entries.last().unwrap().name.clone();
            listed += entries.len();
            let reply =
                FromSupervisor::Reply { id: u64::MAX, result: Ok(Reply::List { entries, more }) };
            let mut decoder = harvest_proto::bridge::Decoder::default();
            decoder.push(&Frame::Control(reply).encode());
            assert!(decoder.take::<FromSupervisor>().is_ok(), "the frame is too long");
            if !more {
                break;
            }
        }
        assert_eq!(listed, 300);
        assert!(list(folder.path(), None).is_err(), "without paging it is an error");
    }
}
