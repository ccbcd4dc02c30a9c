//! Files in a machine. A path is absolute, or begins in the folder where commands run. Links are followed
//! inside the machine, by its own supervisor.

use harvest_proto::bridge::{FaultCode, FileKind, FileRequest, FileStat, Reply};

use super::{InUse, Inside, USER};
use crate::{
    bridge::{BridgeError, FileReading, FileWriting},
    error::SessionError,
};

/// What a path holds.
pub enum Content {
    /// A file, in pieces.
    File(FileStat, Download),
    /// A folder: what is in it after the name asked for, and whether there is more.
    Folder(Vec<FileStat>, bool),
}

/// A file on its way out.
pub struct Download {
    reading: FileReading,
    _in_use: InUse,
}

impl Download {
    /// The next piece; `None` at the end of the file.
    ///
    /// # Errors
    /// When it cannot be read on.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, SessionError> {
        Ok(self.reading.next().await?)
    }
}

impl Inside {
    /// What a path is; a link is a link.
    ///
    /// # Errors
    /// When it is not there.
    pub async fn file_stat(&self, path: &str) -> Result<FileStat, SessionError> {
        let path = self.absolute(path);
        let mut stat = self.bridge.file_stat(&path, false).await?;
        if stat.kind == FileKind::Link && stat.target.is_none() {
            // An older supervisor tells it apart only.
            if let Reply::Link { target } = self.bridge.file(FileRequest::ReadLink { path }).await?
            {
                stat.target = Some(target);
            }
        }
        Ok(stat)
    }

    /// What a path holds; of a folder, what comes after a name. Links are followed.
    ///
    /// # Errors
    /// When it is not there, or is neither file nor folder.
    pub async fn file_get(self, path: &str, after: &str) -> Result<Content, SessionError> {
        let path = self.absolute(path);
        let stat = self.bridge.file_stat(&path, true).await?;
        if stat.kind != FileKind::Folder {
            match self.bridge.file_reading(&path).await {
                Ok(reading) => {
                    return Ok(Content::File(stat, Download { reading, _in_use: self.in_use }));
                }
                // An older supervisor does not say what a link leads to: perhaps a folder.
                Err(BridgeError::Fault(fault))
                    if fault.code == FaultCode::Invalid && stat.kind == FileKind::Link => {}
                Err(error) => return Err(error.into()),
            }
        }
        let (entries, more) = self.bridge.file_list(&path, after).await?;
        Ok(Content::Folder(entries, more))
    }

    /// Begins to write a file. It belongs to `user`, the agent's when absent.
    ///
    /// # Errors
    /// When the machine is gone.
    pub fn file_put(
        &self,
        path: &str,
        mode: u32,
        user: Option<String>,
    ) -> Result<FileWriting, SessionError> {
        Ok(self.bridge.file_writing(&self.absolute(path), mode, Some(owner(user)))?)
    }

    /// Makes a folder. One that is there already is left as it is.
    ///
    /// # Errors
    /// When it cannot be made.
    pub async fn folder_put(
        &self,
        path: &str,
        mode: u32,
        user: Option<String>,
    ) -> Result<(), SessionError> {
        let request =
            FileRequest::Mkdir { path: self.absolute(path), mode, user: Some(owner(user)) };
        self.bridge.file(request).await?;
        Ok(())
    }

    /// Makes a symbolic link, in the place of a file or link of that name.
    ///
    /// # Errors
    /// When it cannot be made.
    pub async fn link_put(
        &self,
        path: &str,
        target: String,
        user: Option<String>,
    ) -> Result<(), SessionError> {
        let request =
            FileRequest::Symlink { path: self.absolute(path), target, user: Some(owner(user)) };
        self.bridge.file(request).await?;
        Ok(())
    }

    /// Removes a file or a link; with `tree` a folder as well, with all that is in it.
    ///
    /// # Errors
    /// When it is not there, or is a folder.
    pub async fn file_remove(&self, path: &str, tree: bool) -> Result<(), SessionError> {
        self.bridge.file(FileRequest::Remove { path: self.absolute(path), tree }).await?;
        Ok(())
    }

    fn absolute(&self, path: &str) -> String {
        match path.starts_with('/') {
            true => path.to_owned(),
            false => format!("{}/{path}", self.folder.trim_end_matches('/')),
        }
    }
}

fn owner(user: Option<String>) -> String {
    user.unwrap_or_else(|| USER.to_owned())
}
