// Signs the cluster's certificates: `certificates FOLDER < requests.json`.
//
// FOLDER gets ca.crt and ca.key (kept when they are there), and NAME.crt and NAME.key for each request.
package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

type request struct {
	Name         string   `json:"name"`
	CommonName   string   `json:"commonName"`
	Organization []string `json:"organization"`
	Addresses    []net.IP `json:"addresses"`
	Hosts        []string `json:"hosts"`
}

func main() {
	if len(os.Args) != 2 {
		fail(errors.New("usage: certificates FOLDER < requests.json"))
	}
	var requests []request
	if err := json.NewDecoder(os.Stdin).Decode(&requests); err != nil {
		fail(fmt.Errorf("reading the requests: %w", err))
	}
	if err := sign(os.Args[1], requests); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "certificates:", err)
	os.Exit(1)
}

func sign(folder string, requests []request) error {
	authority, authorityKey, err := authority(folder)
	if err != nil {
		return err
	}
	for _, wanted := range requests {
		if err := issue(folder, wanted.Name, leaf(wanted), authority, authorityKey); err != nil {
			return fmt.Errorf("certificate %s: %w", wanted.Name, err)
		}
	}
	return nil
}

func authority(folder string) (*x509.Certificate, crypto.PrivateKey, error) {
	path := filepath.Join(folder, "ca")
	if _, err := os.Stat(path + ".crt"); errors.Is(err, fs.ErrNotExist) {
		template := certificate(pkix.Name{CommonName: "outrider-test-rig"})
		template.IsCA = true
		template.BasicConstraintsValid = true
		template.KeyUsage |= x509.KeyUsageCertSign
		if err := issue(folder, "ca", template, nil, nil); err != nil {
			return nil, nil, err
		}
	}
	pair, err := tls.LoadX509KeyPair(path+".crt", path+".key")
	if err != nil {
		return nil, nil, err
	}
	return pair.Leaf, pair.PrivateKey, nil
}

func leaf(wanted request) *x509.Certificate {
	template := certificate(pkix.Name{CommonName: wanted.CommonName, Organization: wanted.Organization})
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	template.IPAddresses = wanted.Addresses
	template.DNSNames = wanted.Hosts
	return template
}

func certificate(subject pkix.Name) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)) // never fails: crypto/rand aborts instead
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      subject,
		NotBefore:    time.Now().Add(-time.Hour), // a clock that steps back a little must not break the cluster
		NotAfter:     time.Now().AddDate(1, 0, 0),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
}

// issue signs with the given authority; a certificate without one signs itself.
func issue(folder, name string, template, signer *x509.Certificate, signerKey crypto.PrivateKey) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if signer == nil {
		signer, signerKey = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, signer, key.Public(), signerKey)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	path := filepath.Join(folder, name)
	if err := write(path+".key", "EC PRIVATE KEY", keyDER, 0o600); err != nil {
		return err
	}
	return write(path+".crt", "CERTIFICATE", der, 0o644)
}

func write(path, kind string, der []byte, mode fs.FileMode) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode)
}
