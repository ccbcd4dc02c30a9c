//! Pulls from a real registry, and from a fake one that misbehaves.

use std::{fs, os::unix::fs::symlink, process::Command as HostCommand, time::Duration};

use harvest_engine::Image;
use harvest_images::{ImageError, PullError, PullOptions, UnpackError, UnpackLimits};

use crate::{
    registries::{DebianRegistry, Documents, FakeRegistry, LOGIN, Reply, Request, digest},
    world::{World, gzip, steps_run, tar},
};

/// Options with short timeouts and without the user's logins.
fn quick() -> PullOptions {
    PullOptions {
        attempts: 3,
        backoff: Duration::from_millis(1),
        idle_timeout: Duration::from_millis(300),
        docker_config: Some("/nonexistent".into()),
        ..PullOptions::default()
    }
}

impl World {
    fn pull(&self, reference: &str, options: &PullOptions) -> Result<Image, ImageError> {
        harvest_images::pull(&self.engine, reference, None, options, &mut |_| {})
    }

    /// Archives of the world's root and of a layer with every kind of change.
    fn two_layers(&self) -> [Vec<u8>; 2] {
        let base = self.root();
        for path in ["old/kept", "old/gone", "all/a", "all/b", "usr/lib/below"] {
            fs::create_dir_all(base.join(path).parent().unwrap()).unwrap();
            fs::write(base.join(path), path).unwrap();
        }
        symlink("usr/lib", base.join("lib")).unwrap();
        let top = self.folder.path().join("top");
        for path in
            ["old/.wh.gone", "all/.wh..wh..opq", "all/c", "lib/above", "work/file", "bin/.wh.wc"]
        {
            fs::create_dir_all(top.join(path).parent().unwrap()).unwrap();
            fs::write(top.join(path), path).unwrap();
        }
        // Without an entry for `lib`, which would hide the symlink below, as most tools write it.
        let archive = HostCommand::new("tar")
            .args(["--numeric-owner", "--no-recursion", "-C"])
            .arg(&top)
            .args([
                "-c",
                "old/.wh.gone",
                "all/.wh..wh..opq",
                "all/c",
                "lib/above",
                "work",
                "work/file",
                "bin/.wh.wc",
            ])
            .output()
            .unwrap();
        assert!(archive.status.success());
        [self.archive(), archive.stdout]
    }

    fn documents(&self) -> Documents {
        Documents::new(&self.two_layers(), "+gzip", gzip)
    }

    /// Pulls from a registry that must fail, and checks that nothing is left.
    fn refused(&self, fake: &FakeRegistry) -> PullError {
        let refused = self.pull(&format!("{}/made:1", fake.host), &quick());
        assert_eq!(self.unfinished(), [""; 0]);
        assert_eq!(self.engine.image("made").unwrap(), None);
        match refused {
            Err(ImageError::Pull { source, .. }) => source,
            other => panic!("{other:?}"),
        }
    }
}

const SHOW: &str = "ls /old /all /usr/lib; readlink /lib; cat /lib/above; \
                    ls /bin/wc 2>/dev/null; id -u; pwd; echo $GREETING";
const SHOWN: &str =
    "/all:\nc\n\n/old:\nkept\n\n/usr/lib:\nabove\nbelow\nusr/lib\nlib/above10001\n/work\nhello";

#[test]
fn images_of_skopeo_are_pulled() {
    let registry = DebianRegistry::start(false);
    for (tag, options) in [("gzip", &[][..]), ("zstd", &["--dest-compress-format=zstd"][..])] {
        // A new world, because layers in the cache are not fetched.
        let world = World::new();
        // skopeo compresses the layers.
        let image = Documents::new(&world.two_layers(), "", <[u8]>::to_vec);
        registry.fill(&image, &format!("some/made:{tag}"), options);
        let pulled = world.pull(&format!("{}/some/made:{tag}", registry.host), &quick()).unwrap();
        assert_eq!((pulled.name.as_str(), pulled.layers.len()), ("made", 2));
        assert_eq!(world.run_in("made", SHOW), SHOWN, "{tag}");
    }
}

#[test]
fn login_comes_from_docker_configuration() {
    let world = World::new();
    let registry = DebianRegistry::start(true);
    registry.fill(&world.documents(), "made:1", &[]);
    let reference = format!("{}/made:1", registry.host);
    let folder = tempfile::tempdir().unwrap();
    let pull = |login: &str| {
        let auth = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, login);
        let config = serde_json::json!({ "auths": { &registry.host: { "auth": auth } } });
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        world.pull(
            &reference,
            &PullOptions { docker_config: Some(folder.path().to_owned()), ..quick() },
        )
    };
    for refused in [world.pull(&reference, &quick()), pull("user:wrong password")] {
        let Err(ImageError::Pull { source: PullError::Login { advice, .. }, .. }) = refused else {
            panic!("the pull succeeded")
        };
        assert!(advice.contains("config.json"), "{advice}");
    }
    pull(LOGIN).unwrap();
}

#[test]
fn login_and_token_reach_no_other_host() {
    let world = World::new();
    let image = world.documents();
    let elsewhere = FakeRegistry::image(&image);
    let blobs = elsewhere.host.clone();
    let tokens = FakeRegistry::start(None, |_, _| {
        Some(Reply::Bytes(br#"{"token":"token-of-the-day"}"#.to_vec()))
    });
    let realm = format!("http://{}/token?a=b", tokens.host);
    let registry = FakeRegistry::start(Some(&image), move |request: &Request, _| {
        if request.authorization.as_deref() != Some("Bearer token-of-the-day") {
            let header =
                format!("WWW-Authenticate: Bearer realm=\"{realm}\",service=\"the registry\"\r\n");
            return Some(Reply::Status(401, header));
        }
        let location = format!("Location: http://{blobs}{}?signature=x\r\n", request.path);
        request.path.contains("/blobs/").then_some(Reply::Status(307, location))
    });
    let folder = tempfile::tempdir().unwrap();
    let config = serde_json::json!({ "auths": { &registry.host: { "username": "me", "password": "mine" } } });
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let options = PullOptions { docker_config: Some(folder.path().to_owned()), ..quick() };
    let pulled = world.pull(&format!("{}/made:1", registry.host), &options);
    let requests = elsewhere.requests();
    assert!(!requests.is_empty());
    assert!(requests.iter().all(|request| request.authorization.is_none()), "{requests:?}");
    pulled.unwrap();
    let requests = tokens.requests();
    assert_eq!(requests.len(), 1, "one token is enough: {requests:?}");
    assert_eq!(requests[0].path, "/token?a=b&scope=repository:made:pull&service=the%20registry");
    assert_eq!(requests[0].authorization.as_deref(), Some("Basic bWU6bWluZQ=="));
}

#[test]
fn unsafe_and_endless_redirects_are_refused() {
    let world = World::new();
    for location in [
        "http://registry.test/made",
        "/v2/made/manifests/1",
        "file:///etc/passwd",
        "http://user@127.0.0.1/",
    ] {
        let fake = FakeRegistry::start(None, move |_, _| {
            Some(Reply::Status(302, format!("Location: {location}\r\n")))
        });
        assert!(matches!(world.refused(&fake), PullError::Redirect { .. }), "{location}");
    }
}

#[test]
fn cached_layers_are_shared_and_not_fetched() {
    let world = World::new();
    let [base, top] = world.two_layers();
    let fake = FakeRegistry::image(&Documents::new(&[base.clone(), top.clone()], "+gzip", gzip));
    let first = world.pull(&format!("{}/made:1", fake.host), &quick()).unwrap();
    let before = fake.count(&digest(&gzip(&base)));
    world.pull(&format!("{}/made:1", fake.host), &quick()).unwrap();
    assert_eq!((before, fake.count(&digest(&gzip(&base)))), (1, 1));
    // The same content with another compression is the same layer.
    let other =
        FakeRegistry::image(&Documents::new(std::slice::from_ref(&base), "", <[u8]>::to_vec));
    let second = world.pull(&format!("{}/other:1", other.host), &quick()).unwrap();
    assert_eq!(
        (second.layers[0].clone(), other.count(&digest(&base))),
        (first.layers[0].clone(), 0)
    );
}

#[test]
fn index_selects_the_image_of_this_platform() {
    let world = World::new();
    let image = world.documents();
    let manifest = digest(&image.manifest);
    let index = serde_json::json!({ "schemaVersion": 2, "manifests": [
        { "digest": digest(b"other"), "size": 5, "platform": { "os": "linux", "architecture": "s390x" } },
        { "digest": manifest, "size": image.manifest.len(), "platform": { "os": "linux", "architecture": "amd64" } },
    ] });
    let index = index.to_string().into_bytes();
    let expected = digest(&index);
    let fake = FakeRegistry::start(Some(&image), move |request, _| {
        request.path.ends_with("/manifests/multi").then(|| Reply::Bytes(index.clone()))
    });
    let pulled = world.pull(&format!("{}/made:multi", fake.host), &quick()).unwrap();
    assert!(pulled.source.contains(&manifest), "{}", pulled.source);
    // Pulled by digest, the index itself must match; this registry answers with another document.
    let refused = world.pull(&format!("{}/made@{expected}", fake.host), &quick());
    assert!(
        matches!(refused, Err(ImageError::Pull { source: PullError::Digest { .. }, .. })),
        "{refused:?}"
    );
}

#[test]
fn blob_with_wrong_digest_or_size_is_refused() {
    let world = World::new();
    let image = world.documents();
    let layer = image.layers[1].clone();
    let wanted = digest(&layer);
    let other = gzip(&tar(&world.folder.path().join("top")));
    let longer = [layer.as_slice(), b"x"].concat();
    let mut damaged = layer.clone();
    damaged[layer.len() / 2] ^= 1;
    for bytes in [other, longer, damaged] {
        let path = wanted.clone();
        let fake = FakeRegistry::start(Some(&image), move |request, _| {
            request.path.ends_with(&path).then(|| Reply::Bytes(bytes.clone()))
        });
        let error = world.refused(&fake);
        assert!(
            matches!(error, PullError::Digest { .. } | PullError::Unreachable { .. }),
            "{error:?}"
        );
    }
    let config = digest(&image.config);
    let fake = FakeRegistry::start(Some(&image), move |request, _| {
        request.path.ends_with(&config).then(|| Reply::Bytes(b"{}".to_vec()))
    });
    assert!(matches!(world.refused(&fake), PullError::Digest { .. }));
}

#[test]
fn malformed_layer_with_matching_digest_is_refused() {
    let world = World::new();
    let [base, _] = world.two_layers();
    let good = Documents::new(std::slice::from_ref(&base), "+gzip", gzip);
    // Not an archive, a truncated one, and one with other content than the configuration says.
    for bytes in [
        gzip(&[b'x'; 4096]),
        gzip(&base[..base.len() / 2]),
        gzip(&tar(&world.folder.path().join("top"))),
    ] {
        let image = Documents::with_config(good.config.clone(), vec![bytes], "+gzip");
        let error = world.refused(&FakeRegistry::image(&image));
        assert!(matches!(error, PullError::Layer { .. } | PullError::Digest { .. }), "{error:?}");
    }
}

#[test]
fn layer_beyond_the_limit_is_refused() {
    let world = World::new();
    let fake = FakeRegistry::image(&world.documents());
    let limits = UnpackLimits { bytes: 100_000, ..UnpackLimits::default() };
    let refused = world.pull(&format!("{}/made:1", fake.host), &PullOptions { limits, ..quick() });
    let Err(ImageError::Pull { source: PullError::Layer { source, .. }, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert!(matches!(source, UnpackError::Limit { .. }), "{source:?}");
    assert_eq!(world.unfinished(), [""; 0]);
}

#[test]
fn server_errors_are_retried() {
    let world = World::new();
    let image = world.documents();
    let fake = FakeRegistry::start(Some(&image), |_, _| Some(Reply::Status(500, String::new())));
    let error = world.refused(&fake);
    assert!(matches!(error, PullError::Status { status: 500, attempts: 3, .. }), "{error:?}");
    assert_eq!(fake.count("/manifests/1"), 3);
    // A pull succeeds when a later attempt does.
    let fake = FakeRegistry::start(Some(&image), |_, before| {
        (before == 0).then(|| Reply::Status(503, String::new()))
    });
    world.pull(&format!("{}/made:1", fake.host), &quick()).unwrap();
}

#[test]
fn hanging_and_broken_connections_are_retried() {
    let world = World::new();
    let image = world.documents();
    let layer = image.layers[0].clone();
    let wanted = digest(&layer);
    let fake = FakeRegistry::start(Some(&image), |_, _| Some(Reply::Hang));
    assert!(matches!(world.refused(&fake), PullError::Unreachable { attempts: 3, .. }));
    for broken in [Reply::Half(layer.clone()), Reply::Cut(layer.clone())] {
        let (path, reply) = (wanted.clone(), broken.clone());
        let fake = FakeRegistry::start(Some(&image), move |request, _| {
            request.path.ends_with(&path).then(|| reply.clone())
        });
        let error = world.refused(&fake);
        assert!(matches!(error, PullError::Unreachable { attempts: 3, .. }), "{error:?}");
        assert_eq!(fake.count(&wanted), 3);
    }
    let path = wanted.clone();
    let fake = FakeRegistry::start(Some(&image), move |request, before| {
        (request.path.ends_with(&path) && before == 0).then(|| Reply::Cut(layer.clone()))
    });
    world.pull(&format!("{}/made:1", fake.host), &quick()).unwrap();
    assert_eq!(world.run_in("made", SHOW), SHOWN);
    assert_eq!(world.unfinished(), [""; 0]);
}

#[test]
fn missing_image_is_named_in_the_error() {
    let world = World::new();
    let fake = FakeRegistry::start(None, |_, _| None);
    let error = world.refused(&fake);
    assert_eq!(error.to_string(), format!("{} has no made/manifests/1", fake.host));
}

#[test]
fn recipe_needs_its_registry_only_once() {
    let world = World::new();
    let fake = FakeRegistry::image(&world.documents());
    let recipe = format!(
        "name = \"x\"\nfrom = {{ oci = \"{}/made:1\" }}\n[[step]]\nuser = \"root\"\n[[step]]\nrun = \"cat /lib/above > /made\"",
        fake.host
    );
    let (image, reports) = world.build(&recipe, false);
    let image = image.unwrap();
    assert_eq!((steps_run(&reports), image.config.workdir.as_str()), (2, "/work"));
    assert_eq!(world.run_in("x", "cat /made"), "lib/above");
    drop(fake);
    let (again, reports) = world.build(&recipe, false);
    assert_eq!((again.unwrap(), steps_run(&reports)), (image, 0));
}
