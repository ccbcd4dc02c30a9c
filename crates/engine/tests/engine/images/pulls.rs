//! Pulling: what a registry has is what a sandbox sees, and what a registry should not do is found out.

use harvest_engine::PullError;

use super::{
    fake::{Asked, Debians, Documents, Fake, LOGIN, Reply, digest, gzip, tar},
    *,
};

fn quick() -> PullOptions {
    PullOptions {
        attempts: 3,
        backoff: Duration::from_millis(1),
        silence: Duration::from_millis(300),
        docker_config: Some("/nonexistent".into()),
        ..PullOptions::default()
    }
}

impl World {
    fn pull(&self, reference: &str, options: &PullOptions) -> Result<Image, EngineError> {
        self.engine.image_pull(reference, None, options, &mut |_| {})
    }

    /// The tests' own file tree, and a layer that changes it in every way.
    fn two_layers(&self) -> [Vec<u8>; 2] {
        let base = self.folder.path().join("cache/layers/base");
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
        // A folder where there is a link below would hide it: most tools leave out its entry.
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

    fn document(&self) -> Documents {
        Documents::new(&self.two_layers(), "+gzip", gzip)
    }

    fn refused(&self, fake: &Fake) -> PullError {
        let refused = self.pull(&format!("{}/made:1", fake.host), &quick());
        assert_eq!(self.half_made(), [""; 0]);
        assert_eq!(self.engine.image("made").unwrap(), None);
        match refused {
            Err(EngineError::Pull { source, .. }) => source,
            other => panic!("{other:?}"),
        }
    }
}

const LOOK: &str = "ls /old /all /usr/lib; readlink /lib; cat /lib/above; ls /bin/wc 2>/dev/null; id -u; pwd; echo $GREETING";
const SEEN: &str =
    "/all:\nc\n\n/old:\nkept\n\n/usr/lib:\nabove\nbelow\nusr/lib\nlib/above10001\n/work\nhello";

#[test]
fn an_image_is_pulled_from_debians_registry_as_skopeo_put_it_there() {
    let registry = Debians::start(false);
    for (tag, options) in [("gzip", &[][..]), ("zstd", &["--dest-compress-format=zstd"][..])] {
        // A world each: what is there already would not be fetched.
        let world = World::new();
        // Sent by skopeo as it was told to.
        let image = Documents::new(&world.two_layers(), "", <[u8]>::to_vec);
        registry.fill(&image, &format!("some/made:{tag}"), options);
        let pulled = world.pull(&format!("{}/some/made:{tag}", registry.host), &quick()).unwrap();
        assert_eq!((pulled.name.as_str(), pulled.layers.len()), ("made", 2));
        assert_eq!(world.in_image("made", LOOK), SEEN, "{tag}");
    }
}

#[test]
fn a_login_of_the_docker_configuration_opens_debians_registry() {
    let world = World::new();
    let registry = Debians::start(true);
    registry.fill(&world.document(), "made:1", &[]);
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
        let Err(EngineError::Pull { source: PullError::Login { advice, .. }, .. }) = refused else {
            panic!("it came")
        };
        assert!(advice.contains("config.json"), "{advice}");
    }
    pull(LOGIN).unwrap();
}

#[test]
fn a_token_is_fetched_with_the_login_and_no_other_host_sees_either() {
    let world = World::new();
    let image = world.document();
    let elsewhere = Fake::image(&image);
    let blobs = elsewhere.host.clone();
    let tokens =
        Fake::start(None, |_, _| Some(Reply::Bytes(br#"{"token":"token-of-the-day"}"#.to_vec())));
    let realm = format!("http://{}/token?a=b", tokens.host);
    let registry = Fake::start(Some(&image), move |asked: &Asked, _| {
        if asked.authorization.as_deref() != Some("Bearer token-of-the-day") {
            let header =
                format!("WWW-Authenticate: Bearer realm=\"{realm}\",service=\"the registry\"\r\n");
            return Some(Reply::Status(401, header));
        }
        let location = format!("Location: http://{blobs}{}?signature=x\r\n", asked.path);
        asked.path.contains("/blobs/").then_some(Reply::Status(307, location))
    });
    let folder = tempfile::tempdir().unwrap();
    let config = serde_json::json!({ "auths": { &registry.host: { "username": "me", "password": "mine" } } });
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let options = PullOptions { docker_config: Some(folder.path().to_owned()), ..quick() };
    let pulled = world.pull(&format!("{}/made:1", registry.host), &options);
    let seen = elsewhere.asked.lock().unwrap().clone();
    assert!(!seen.is_empty() && seen.iter().all(|asked| asked.authorization.is_none()), "{seen:?}");
    pulled.unwrap();
    let asked = tokens.asked.lock().unwrap().clone();
    assert_eq!(asked.len(), 1, "one token is enough: {asked:?}");
    assert_eq!(asked[0].path, "/token?a=b&scope=repository:made:pull&service=the%20registry");
    assert_eq!(asked[0].authorization.as_deref(), Some("Basic bWU6bWluZQ=="));
}

#[test]
fn a_redirect_away_from_tls_or_without_end_is_not_followed() {
    let world = World::new();
    for location in [
        "http://registry.test/made",
        "/v2/made/manifests/1",
        "file:///etc/passwd",
        "http://user@127.0.0.1/",
    ] {
        let fake = Fake::start(None, move |_, _| {
            Some(Reply::Status(302, format!("Location: {location}\r\n")))
        });
        assert!(matches!(world.refused(&fake), PullError::Redirect { .. }), "{location}");
    }
}

#[test]
fn an_image_that_is_there_is_not_fetched_again_and_layers_are_shared() {
    let world = World::new();
    let [base, top] = world.two_layers();
    let fake = Fake::image(&Documents::new(&[base.clone(), top.clone()], "+gzip", gzip));
    let first = world.pull(&format!("{}/made:1", fake.host), &quick()).unwrap();
    let before = fake.count(&digest(&gzip(&base)));
    world.pull(&format!("{}/made:1", fake.host), &quick()).unwrap();
    assert_eq!((before, fake.count(&digest(&gzip(&base)))), (1, 1));
    // The same content in another wrapping is the same layer.
    let other = Fake::image(&Documents::new(std::slice::from_ref(&base), "", <[u8]>::to_vec));
    let second = world.pull(&format!("{}/other:1", other.host), &quick()).unwrap();
    assert_eq!(
        (second.layers[0].clone(), other.count(&digest(&base))),
        (first.layers[0].clone(), 0)
    );
}

#[test]
fn of_an_index_the_image_for_this_machine_is_pulled() {
    let world = World::new();
    let image = world.document();
    let manifest = digest(&image.manifest);
    let index = serde_json::json!({ "schemaVersion": 2, "manifests": [
        { "digest": digest(b"other"), "size": 5, "platform": { "os": "linux", "architecture": "s390x" } },
        { "digest": manifest, "size": image.manifest.len(), "platform": { "os": "linux", "architecture": "amd64" } },
    ] });
    let index = index.to_string().into_bytes();
    let expected = digest(&index);
    let fake = Fake::start(Some(&image), move |asked, _| {
        asked.path.ends_with("/manifests/multi").then(|| Reply::Bytes(index.clone()))
    });
    let pulled = world.pull(&format!("{}/made:multi", fake.host), &quick()).unwrap();
    assert!(pulled.source.contains(&manifest), "{}", pulled.source);
    // By digest the index itself must be what was asked for, and this registry has another.
    let refused = world.pull(&format!("{}/made@{expected}", fake.host), &quick());
    assert!(
        matches!(refused, Err(EngineError::Pull { source: PullError::Digest { .. }, .. })),
        "{refused:?}"
    );
}

#[test]
fn a_blob_with_a_wrong_digest_or_size_is_refused() {
    let world = World::new();
    let image = world.document();
    let layer = image.layers[1].clone();
    let wanted = digest(&layer);
    let other = gzip(&tar(&world.folder.path().join("top")));
    let longer = [layer.as_slice(), b"x"].concat();
    let mut damaged = layer.clone();
    damaged[layer.len() / 2] ^= 1;
    for bytes in [other, longer, damaged] {
        let path = wanted.clone();
        let fake = Fake::start(Some(&image), move |asked, _| {
            asked.path.ends_with(&path).then(|| Reply::Bytes(bytes.clone()))
        });
        let error = world.refused(&fake);
        // Shorter or longer: either way it is told before anybody believes it.
        assert!(
            matches!(error, PullError::Digest { .. } | PullError::Unreachable { .. }),
            "{error:?}"
        );
    }
    let config = digest(&image.config);
    let fake = Fake::start(Some(&image), move |asked, _| {
        asked.path.ends_with(&config).then(|| Reply::Bytes(b"{}".to_vec()))
    });
    assert!(matches!(world.refused(&fake), PullError::Digest { .. }));
}

#[test]
fn a_layer_that_is_corrupt_under_a_right_digest_is_refused() {
    let world = World::new();
    let [base, _] = world.two_layers();
    let good = Documents::new(std::slice::from_ref(&base), "+gzip", gzip);
    // Not an archive, and an archive of something else than the configuration says.
    for bytes in [
        gzip(&[b'x'; 4096]),
        gzip(&base[..base.len() / 2]),
        gzip(&tar(&world.folder.path().join("top"))),
    ] {
        let image = Documents::with_config(good.config.clone(), vec![bytes], "+gzip");
        let error = world.refused(&Fake::image(&image));
        assert!(matches!(error, PullError::Layer { .. } | PullError::Digest { .. }), "{error:?}");
    }
}

#[test]
fn a_layer_larger_than_allowed_is_refused() {
    let world = World::new();
    let fake = Fake::image(&world.document());
    let limits = UnpackLimits { bytes: 100_000, ..UnpackLimits::default() };
    let refused = world.pull(&format!("{}/made:1", fake.host), &PullOptions { limits, ..quick() });
    let Err(EngineError::Pull { source: PullError::Layer { source, .. }, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert!(matches!(source, UnpackError::Limit { .. }), "{source:?}");
    assert_eq!(world.half_made(), [""; 0]);
}

#[test]
fn a_registry_that_answers_500_is_asked_a_few_times() {
    let world = World::new();
    let image = world.document();
    let fake = Fake::start(Some(&image), |_, _| Some(Reply::Status(500, String::new())));
    let error = world.refused(&fake);
    assert!(matches!(error, PullError::Status { status: 500, attempts: 3, .. }), "{error:?}");
    assert_eq!(fake.count("/manifests/1"), 3);
    // One that recovers is as good as one that never failed.
    let fake = Fake::start(Some(&image), |_, before| {
        (before == 0).then(|| Reply::Status(503, String::new()))
    });
    world.pull(&format!("{}/made:1", fake.host), &quick()).unwrap();
}

#[test]
fn a_registry_that_hangs_or_breaks_off_is_given_up() {
    let world = World::new();
    let image = world.document();
    let layer = image.layers[0].clone();
    let wanted = digest(&layer);
    let fake = Fake::start(Some(&image), |_, _| Some(Reply::Hang));
    assert!(matches!(world.refused(&fake), PullError::Unreachable { attempts: 3, .. }));
    for broken in [Reply::Half(layer.clone()), Reply::Cut(layer.clone())] {
        let (path, reply) = (wanted.clone(), broken.clone());
        let fake = Fake::start(Some(&image), move |asked, _| {
            asked.path.ends_with(&path).then(|| reply.clone())
        });
        let error = world.refused(&fake);
        assert!(matches!(error, PullError::Unreachable { attempts: 3, .. }), "{error:?}");
        assert_eq!(fake.count(&wanted), 3);
    }
    let path = wanted.clone();
    let fake = Fake::start(Some(&image), move |asked, before| {
        (asked.path.ends_with(&path) && before == 0).then(|| Reply::Cut(layer.clone()))
    });
    world.pull(&format!("{}/made:1", fake.host), &quick()).unwrap();
    assert_eq!(world.in_image("made", LOOK), SEEN);
    assert_eq!(world.half_made(), [""; 0]);
}

#[test]
fn an_image_the_registry_does_not_have_is_named() {
    let world = World::new();
    let fake = Fake::start(None, |_, _| None);
    let error = world.refused(&fake);
    assert_eq!(error.to_string(), format!("{} has no made/manifests/1", fake.host));
}

#[test]
fn a_recipe_starts_from_a_registry_and_needs_it_once() {
    let world = World::new();
    let fake = Fake::image(&world.document());
    let recipe = format!(
        "name = \"x\"\nfrom = {{ oci = \"{}/made:1\" }}\n[[step]]\nuser = \"root\"\n[[step]]\nrun = \"cat /lib/above > /made\"",
        fake.host
    );
    let (image, seen) = world.make(&recipe, false);
    let image = image.unwrap();
    assert_eq!((made(&seen), image.config.workdir.as_str()), (2, "/work"));
    assert_eq!(world.in_image("x", "cat /made"), "lib/above");
    drop(fake);
    let (again, seen) = world.make(&recipe, false);
    assert_eq!((again.unwrap(), made(&seen)), (image, 0));
}
