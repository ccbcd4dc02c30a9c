//! Files in a sandbox. A path is absolute, or relative to the folder where commands run. Links are
//! resolved inside the sandbox, by its supervisor, with the access of one user: what the user
//! cannot reach, a link does not reach either.

use harvest_proto::bridge::{FileKind, FileRequest, FileStat};

use super::{SandboxError, SandboxHandle, UseGuard};
use crate::bridge::{FileReader, FileWriter};

/// What a path refers to.
pub enum PathContent {
    File(FileStat, FileDownload),
    /// The entries after the given name, and whether there are more.
    Folder(Vec<FileStat>, bool),
}

/// A file being read.
pub struct FileDownload {
    reader: FileReader,
    _use_guard: UseGuard,
}

impl FileDownload {
    /// The next chunk; `None` at the end of the file.
    ///
    /// # Errors
    /// When the file cannot be read further.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, SandboxError> {
        Ok(self.reader.next().await?)
    }
}

impl SandboxHandle {
    /// Describes a path; links are not followed.
    ///
    /// # Errors
    /// When it does not exist.
    pub async fn file_stat(
        &self,
        path: &str,
        user: Option<String>,
    ) -> Result<FileStat, SandboxError> {
        Ok(self.bridge.file_stat(&self.absolute(path), self.file_user(user), false).await?)
    }

    /// Opens a file, or lists the entries of a folder after a name. Links are followed.
    ///
    /// # Errors
    /// When it does not exist, or is neither file nor folder.
    pub async fn file_get(
        self,
        path: &str,
        user: Option<String>,
        after: &str,
    ) -> Result<PathContent, SandboxError> {
        let (path, user) = (self.absolute(path), self.file_user(user));
        let stat = self.bridge.file_stat(&path, user.clone(), true).await?;
        if stat.kind != FileKind::Folder {
            let reader = self.bridge.file_reader(&path, user).await?;
            let download = FileDownload { reader, _use_guard: self.use_guard };
            return Ok(PathContent::File(stat, download));
        }
        let (entries, more) = self.bridge.file_list(&path, user, after).await?;
        Ok(PathContent::Folder(entries, more))
    }

    /// Starts to write a file.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn file_put(
        &self,
        path: &str,
        mode: u32,
        user: Option<String>,
    ) -> Result<FileWriter, SandboxError> {
        Ok(self.bridge.file_writer(&self.absolute(path), mode, self.file_user(user))?)
    }

    /// Creates a folder; an existing one is left as it is.
    ///
    /// # Errors
    /// When it cannot be created.
    pub async fn folder_put(
        &self,
        path: &str,
        mode: u32,
        user: Option<String>,
    ) -> Result<(), SandboxError> {
        let request = FileRequest::Mkdir { path: self.absolute(path), mode };
        self.bridge.file(self.file_user(user), request).await?;
        Ok(())
    }

    /// Creates a symbolic link; replaces a file or link of that name.
    ///
    /// # Errors
    /// When it cannot be created.
    pub async fn link_put(
        &self,
        path: &str,
        target: String,
        user: Option<String>,
    ) -> Result<(), SandboxError> {
        let request = FileRequest::Symlink { path: self.absolute(path), target };
        self.bridge.file(self.file_user(user), request).await?;
        Ok(())
    }

    /// Removes a file or a link; with `tree` also a folder with its contents.
    ///
    /// # Errors
    /// When it does not exist, or is a folder and `tree` is not set.
    pub async fn file_remove(
        &self,
        path: &str,
        user: Option<String>,
        tree: bool,
    ) -> Result<(), SandboxError> {
        let request = FileRequest::Remove { path: self.absolute(path), tree };
        self.bridge.file(self.file_user(user), request).await?;
        Ok(())
    }

    fn absolute(&self, path: &str) -> String {
        match path.starts_with('/') {
            true => path.to_owned(),
            false => {
                let folder = self.defaults.folder.as_deref().unwrap_or("/");
                format!("{}/{path}", folder.trim_end_matches('/'))
            }
        }
    }

    fn file_user(&self, user: Option<String>) -> Option<String> {
        user.or_else(|| Some(self.defaults.file_user.to_owned()))
    }
}
