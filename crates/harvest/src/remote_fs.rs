//! The file system of a sandbox over the API, as blocking calls for a copy: each call waits on the
//! async runtime. File contents are streamed.

use std::{
    io::{self, Read, Write},
    sync::Arc,
};

use anyhow::{Context, Result};
use futures_util::StreamExt;
use harvest_engine::supervisor_client::RemoteFs;
use harvest_proto::{
    api::Page,
    bridge::{FileKind, FileStat},
};
use harvest_server::in_process::{ByteStream, RequestBody};
use reqwest::{Method, header::HeaderMap};
use tokio::{runtime::Handle, sync::mpsc, task::JoinHandle};

use crate::{
    backend::{self, Backend},
    printer::ApiRefusal,
};

// The size of one bridge frame.
const CHUNK_BYTES: usize = 64 * 1024;

// Chunks buffered between disk and network.
const CHUNKS_IN_FLIGHT: usize = 4;

/// The files of a sandbox. Every call blocks: use it on a blocking thread.
pub(crate) struct SandboxFiles {
    backend: Arc<Backend>,
    route: String,
    user: Option<String>,
    runtime: Handle,
}

impl SandboxFiles {
    /// `route` is the path of the sandbox's files in the API; `user` the one whose access applies.
    pub(crate) fn new(backend: Backend, route: String, user: Option<String>) -> Self {
        Self { backend: Arc::new(backend), route, user, runtime: Handle::current() }
    }

    fn path(&self, query: &[(&str, &str)]) -> String {
        format!("{}?{}", self.route, crate::client::query(query))
    }

    fn request(&self, method: Method, query: &[(&str, &str)]) -> Result<(HeaderMap, ByteStream)> {
        let user = self.user.iter().map(|user| ("user", user.as_str()));
        let path = self.path(&query.iter().copied().chain(user).collect::<Vec<_>>());
        self.runtime.block_on(self.backend.exchange(method, &path, RequestBody::Empty))
    }

    fn put(
        &self,
        path: &str,
        query: &[(&str, &str)],
        user: Option<&str>,
        sent: RequestBody,
    ) -> Upload {
        let mut all = vec![("path", path)];
        all.extend(user.map(|user| ("user", user)));
        all.extend(query);
        let (backend, path) = (Arc::clone(&self.backend), self.path(&all));
        self.runtime
            .spawn(async move { backend.exchange(Method::PUT, &path, sent).await.map(drop) })
    }
}

type Upload = JoinHandle<Result<()>>;

fn is_folder(headers: &HeaderMap) -> bool {
    headers.get("x-harvest-kind").is_some_and(|kind| kind == "folder")
}

impl RemoteFs for SandboxFiles {
    type Error = anyhow::Error;

    fn local(error: io::Error) -> anyhow::Error {
        anyhow::Error::new(error).context("the copy failed on this machine")
    }

    fn is_missing(error: &anyhow::Error) -> bool {
        error.downcast_ref::<ApiRefusal>().is_some_and(|refused| refused.0.status == 404)
    }

    fn stat(&mut self, path: &str) -> Result<FileStat> {
        let answer = self.request(Method::HEAD, &[("path", path)]).map_err(|error| {
            match Self::is_missing(&error) {
                true => error.context(format!("{path} does not exist in the sandbox")),
                // The response to HEAD has no body; the one to GET says why it is refused.
                false => self.request(Method::GET, &[("path", path)]).err().unwrap_or(error),
            }
        });
        stat_from_headers(path, &answer?.0).context("the response lacks the file's metadata")
    }

    fn list_all(&mut self, path: &str) -> Result<Vec<FileStat>> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let mut query = vec![("path", path), ("limit", "1000")];
            query.extend(cursor.as_deref().map(|cursor| ("cursor", cursor)));
            let (headers, body) = self.request(Method::GET, &query)?;
            anyhow::ensure!(is_folder(&headers), "{path} is not a folder");
            let page: Page<FileStat> = self.runtime.block_on(backend::read_json(body))?;
            all.extend(page.items);
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    fn read(&mut self, path: &str, to: &mut dyn Write) -> Result<()> {
        let (headers, mut body) = self.request(Method::GET, &[("path", path)])?;
        anyhow::ensure!(!is_folder(&headers), "{path} is now a folder");
        while let Some(chunk) = self.runtime.block_on(body.next()) {
            let chunk = chunk.with_context(|| format!("the download of {path} broke off"))?;
            to.write_all(&chunk).map_err(Self::local)?;
        }
        Ok(())
    }

    fn write(
        &mut self,
        path: &str,
        mode: u32,
        user: Option<&str>,
        from: &mut dyn Read,
    ) -> Result<()> {
        let (sender, mut receiver) = mpsc::channel::<io::Result<Vec<u8>>>(CHUNKS_IN_FLIGHT);
        let chunks = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
        let sent = RequestBody::Stream("application/octet-stream", chunks.boxed());
        let sent = self.put(path, &[("mode", &format!("{mode:o}"))], user, sent);
        let fed = feed(from, CHUNK_BYTES, &sender);
        drop(sender);
        let answer = self.runtime.block_on(sent)?;
        // A local read error is the cause of the server's error.
        fed.map_err(Self::local)?;
        answer
    }

    fn make_folder(&mut self, path: &str, mode: u32, user: Option<&str>) -> Result<()> {
        let mode = format!("{mode:o}");
        let made = self.put(path, &[("kind", "folder"), ("mode", &mode)], user, RequestBody::Empty);
        self.runtime.block_on(made)?
    }

    fn make_link(&mut self, path: &str, target: &str, user: Option<&str>) -> Result<()> {
        let made =
            self.put(path, &[("kind", "link"), ("target", target)], user, RequestBody::Empty);
        self.runtime.block_on(made)?
    }
}

/// Sends a file in chunks. The receiver is gone when the server has refused the upload.
pub(crate) fn feed(
    from: &mut dyn Read,
    max_chunk: usize,
    to: &mpsc::Sender<io::Result<Vec<u8>>>,
) -> io::Result<()> {
    loop {
        let mut chunk = vec![0; max_chunk];
        match from.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                chunk.truncate(count);
                if to.blocking_send(Ok(chunk)).is_err() {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                // Abort the request: a regular end would leave half a file.
                let same = error.raw_os_error().map(io::Error::from_raw_os_error);
                let _ = to.blocking_send(Err(same.unwrap_or_else(|| error.kind().into())));
                return Err(error);
            }
        }
    }
}

/// Parses the file metadata in response headers.
fn stat_from_headers(path: &str, headers: &HeaderMap) -> Option<FileStat> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let kind = match text("x-harvest-kind")? {
        "file" => FileKind::File,
        "folder" => FileKind::Folder,
        "link" => FileKind::Link,
        _ => FileKind::Other,
    };
    Some(FileStat {
        name: path.rsplit('/').next().unwrap_or_default().to_owned(),
        kind,
        size: text("x-harvest-size")?.parse().ok()?,
        mode: u32::from_str_radix(text("x-harvest-mode")?, 8).ok()?,
        uid: text("x-harvest-uid")?.parse().ok()?,
        // Not used by a copy.
        modified: harvest_proto::Timestamp::from_millis(0),
        target: text("x-harvest-target").and_then(percent_decoded),
    })
}

/// Decodes a percent-encoded header value.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'%' {
            let (digits, after) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = after;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_targets_are_percent_decoded() {
        assert_eq!(percent_decoded("/a%20b/%C3%A4%0A%25").as_deref(), Some("/a b/ä\n%"));
        assert_eq!(
            (percent_decoded("%"), percent_decoded("%zz"), percent_decoded("%ff")),
            (None, None, None)
        );
    }

    #[test]
    fn read_error_aborts_the_upload() {
        struct FailingReader;
        impl Read for FailingReader {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StaleNetworkFileHandle.into())
            }
        }
        let (sender, mut receiver) = mpsc::channel(CHUNKS_IN_FLIGHT);
        assert!(feed(&mut FailingReader, CHUNK_BYTES, &sender).is_err());
        assert!(receiver.try_recv().unwrap().is_err());
    }
}
