//! Files in a sandbox. A path is absolute, or relative to the folder where commands run. Links are
//! resolved inside the sandbox, by its supervisor.

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
    pub async fn file_stat(&self, path: &str) -> Result<FileStat, SandboxError> {
        Ok(self.bridge.file_stat(&self.absolute(path), false).await?)
    }

    /// Opens a file, or lists the entries of a folder after a name. Links are followed.
    ///
    /// # Errors
    /// When it does not exist, or is neither file nor folder.
    pub async fn file_get(self, path: &str, after: &str) -> Result<PathContent, SandboxError> {
        let path = self.absolute(path);
        let stat = self.bridge.file_stat(&path, true).await?;
        if stat.kind != FileKind::Folder {
            let reader = self.bridge.file_reader(&path).await?;
            let download = FileDownload { reader, _use_guard: self.use_guard };
            return Ok(PathContent::File(stat, download));
        }
        let (entries, more) = self.bridge.file_list(&path, after).await?;
        Ok(PathContent::Folder(entries, more))
    }

    /// Starts to write a file that belongs to `user`; to the default owner when absent.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn file_put(
        &self,
        path: &str,
        mode: u32,
        user: Option<String>,
    ) -> Result<FileWriter, SandboxError> {
        Ok(self.bridge.file_writer(&self.absolute(path), mode, Some(self.owner(user)))?)
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
        let request =
            FileRequest::Mkdir { path: self.absolute(path), mode, user: Some(self.owner(user)) };
        self.bridge.file(request).await?;
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
        let request = FileRequest::Symlink {
            path: self.absolute(path),
            target,
            user: Some(self.owner(user)),
        };
        self.bridge.file(request).await?;
        Ok(())
    }

    /// Removes a file or a link; with `tree` also a folder with its contents.
    ///
    /// # Errors
    /// When it does not exist, or is a folder and `tree` is not set.
    pub async fn file_remove(&self, path: &str, tree: bool) -> Result<(), SandboxError> {
        self.bridge.file(FileRequest::Remove { path: self.absolute(path), tree }).await?;
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

    fn owner(&self, user: Option<String>) -> String {
        user.unwrap_or_else(|| self.defaults.file_owner.to_owned())
    }
}
