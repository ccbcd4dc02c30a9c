//! File requests act with the access of their user, wherever the links of processes inside lead.

use std::os::unix::fs::{chown, symlink};

use super::*;

const AGENT: u32 = 10001;

struct Files {
    sandbox: Sandbox,
    client: Client,
}

impl Files {
    /// The agent's folder `home` with links to a file and a folder of root.
    fn with_hostile_links() -> Self {
        let sandbox = Sandbox::start();
        let client = sandbox.client();
        let files = Self { sandbox, client };
        fs::create_dir(files.sandbox.at("private")).unwrap();
        fs::set_permissions(files.sandbox.at("private"), fs::Permissions::from_mode(0o700))
            .unwrap();
        fs::write(files.sandbox.at("private/secret"), "secret").unwrap();
        chown(files.sandbox.at("home"), Some(AGENT), Some(AGENT)).unwrap();
        symlink(files.sandbox.at("private/secret"), files.sandbox.at("home/file")).unwrap();
        symlink(files.sandbox.at("private"), files.sandbox.at("home/folder")).unwrap();
        files
    }

    fn path(&self, name: &str) -> String {
        self.sandbox.at(name).display().to_string()
    }

    fn request(&mut self, user: &str, request: FileRequest) -> Result<Reply, Fault> {
        let user = Some(user.to_owned());
        self.client.request(|id| ToSupervisor::File { id, user, request })
    }

    fn write(&mut self, user: &str, path: String) -> Result<Reply, Fault> {
        let stream = 5;
        self.client.next += 1;
        let (id, user) = (self.client.next, Some(user.to_owned()));
        let request = FileRequest::Write { path, mode: 0o644, stream };
        self.client.send(ToSupervisor::File { id, user, request });
        self.client.send(ToSupervisor::End { stream });
        self.client.until(|client| client.replies.remove(&id))
    }

    /// What is refused to a user of all that can be done through the links.
    fn denied(&mut self, user: &str) -> Vec<&'static str> {
        let (file, inner, new) =
            (self.path("home/file"), self.path("home/folder/secret"), self.path("home/folder/new"));
        let list = FileRequest::List { path: self.path("home/folder"), after: None };
        let mkdir = FileRequest::Mkdir { path: self.path("home/folder/made"), mode: 0o755 };
        let target = "x".to_owned();
        let link = FileRequest::Symlink { path: self.path("home/folder/link"), target };
        let results = [
            ("read", self.request(user, FileRequest::Read { path: file.clone(), stream: 6 })),
            ("stat", self.request(user, FileRequest::Stat { path: file, follow: true })),
            ("list", self.request(user, list)),
            ("write", self.write(user, new)),
            ("mkdir", self.request(user, mkdir)),
            ("symlink", self.request(user, link)),
            ("remove", self.request(user, FileRequest::Remove { path: inner, tree: true })),
        ];
        let denied = |result: &Result<Reply, Fault>| {
            result.as_ref().is_err_and(|fault| fault.code == FaultCode::Denied)
        };
        results.iter().filter(|(_, result)| denied(result)).map(|(name, _)| *name).collect()
    }
}

#[test]
fn links_lead_only_where_the_user_may_go() {
    let mut files = Files::with_hostile_links();
    let all = ["read", "stat", "list", "write", "mkdir", "symlink", "remove"];
    assert_eq!(files.denied("harvest"), all);
    let left: Vec<_> = fs::read_dir(files.sandbox.at("private")).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "nothing was written or removed: {left:?}");
    assert_eq!(files.denied("root"), [""; 0], "control: root reaches all of it");
}

#[test]
fn new_files_belong_to_the_requests_user() {
    use std::os::unix::fs::MetadataExt;
    let mut files = Files::with_hostile_links();
    let (file, folder) = (files.path("home/new"), files.path("home/made"));
    assert_eq!(files.write("harvest", file.clone()), Ok(Reply::Done));
    let mkdir = FileRequest::Mkdir { path: folder.clone(), mode: 0o775 };
    assert_eq!(files.request("harvest", mkdir), Ok(Reply::Done));
    for (path, mode) in [(file, 0o644), (folder, 0o775)] {
        let about = fs::metadata(&path).unwrap();
        let found = (about.uid(), about.gid(), about.mode() & 0o7777);
        assert_eq!(found, (AGENT, AGENT, mode), "{path}");
    }
    // A thread that served one user serves the next with the next one's access.
    let path = files.path("private/secret");
    let stat = |path: &str| FileRequest::Stat { path: path.to_owned(), follow: false };
    for _ in 0..8 {
        assert!(files.request("root", stat(&path)).is_ok());
        assert!(files.request("harvest", stat(&path)).is_err());
    }
}
